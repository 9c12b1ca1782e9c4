"""Lazy imports of optional dependencies, with an error that names the extra to install."""

from __future__ import annotations

import importlib
import os
from typing import Any, Literal

from ..protocol.errors import MissingDependencyError


def load_module(name: str, extra: Literal["edge", "calibrate", "train", "embed", "ui"]) -> Any:
    """Import the module `name`. Raises MissingDependencyError with the install command if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        message = f"{package} is not installed: pip install '.[{extra}]' in a clone of Updraft."
        raise MissingDependencyError(message) from error


def load_onnxruntime() -> Any:
    """Import `onnxruntime` without telemetry. Raises the errors of `load_module`.

    On import, telemetry would start a thread that reports to the vendor, but users chose a library that keeps requests
    on the device. A child of `os.fork()` lacks the thread, and its exit would wait for the thread forever.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    return load_module("onnxruntime", "edge")


def check_fitting() -> None:
    """Raise MissingDependencyError if a policy cannot be fitted here. Call this function before any paid request."""
    for name in ("scipy.sparse", "sklearn.ensemble", "onnx"):
        load_module(name, "calibrate")
    load_onnxruntime()
