"""Updraft: answers on the device when that is good enough, and in the cloud when it is not.

`import updraft` loads neither torch, llama.cpp nor `openai`: clients and transports are resolved on first use.
"""

# ruff: noqa: E402 - the module path must be safe before other imports

import os
import sys


def _leave_working_folder() -> None:
    """Remove the working folder from the module path if `python -m` runs this package.

    `python -m` puts the working folder first. A `json.py` in the folder of a downloaded model would then run. The
    folder stays on the path if it contains this package.
    """
    if getattr(sys, "argv", [])[:1] == ["-m"] and not sys.flags.safe_path:  # while Python looks for it
        started = sys.orig_argv[len(sys.orig_argv) - len(sys.argv)]
        home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - the folder may hold a pathlib.py
        if started.partition(".")[0] in (__name__, f"-m{__name__}") and sys.path[0] != home:
            del sys.path[0]


_leave_working_folder()

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sdk import AsyncOpenAI as AsyncOpenAI
    from .sdk import OpenAI as OpenAI
    from .sdk.libraries import async_transport as async_transport
    from .sdk.libraries import transport as transport
    from .sdk.requests import routing as routing

__version__ = "0.1.0"
__all__ = ["AsyncOpenAI", "OpenAI", "__version__", "async_transport", "routing", "transport"]

_HOMES = {
    "OpenAI": "client",
    "AsyncOpenAI": "client",
    "transport": "libraries",
    "async_transport": "libraries",
    "routing": "requests",
}


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is not None:
        return getattr(importlib.import_module(f".sdk.{home}", __name__), name)
    raise AttributeError(f"module 'updraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
