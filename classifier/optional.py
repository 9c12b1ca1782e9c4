"""Import what only some installations have, at the moment it is needed, or say which extra brings it."""

from __future__ import annotations

import importlib
import os
from typing import Any, Literal

from ..protocol.errors import MissingDependencyError


def load_module(name: str, extra: Literal["edge", "calibrate", "train", "embed", "ui"]) -> Any:
    """The module `name`. Raises MissingDependencyError with the exact command if its package is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        message = f"{package} is not installed: pip install '.[{extra}]' in a clone of Updraft."
        raise MissingDependencyError(message) from error


def load_onnxruntime() -> Any:
    """The module `onnxruntime`, without its telemetry. Raises as `load_module` does.

    On import it starts a thread that reports to its maker: an endpoint that nobody chose, in a library that keeps
    requests on the device. That thread is not in a child of `os.fork()`, whose exit would wait for it for ever.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    return load_module("onnxruntime", "edge")


def check_fitting() -> None:
    """Raise MissingDependencyError if a policy cannot be fitted here: call it before any prompt is paid for."""
    for name in ("scipy.sparse", "sklearn.ensemble", "onnx"):
        load_module(name, "calibrate")
    load_onnxruntime()
