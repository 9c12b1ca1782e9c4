"""Import what only some installations have, at the moment it is needed, or say which extra brings it."""

from __future__ import annotations

import importlib
from typing import Any, Literal

from ..protocol.errors import MissingDependencyError


def load_module(name: str, extra: Literal["edge", "train"]) -> Any:
    """The module `name`. Raises MissingDependencyError with the exact command if its package is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingDependencyError(f"{package} is not installed: pip install 'updraft-llm[{extra}]'.") from error
