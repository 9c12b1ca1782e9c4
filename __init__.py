"""Updraft: answers on the device when that is good enough, and in the cloud when it is not.

`import updraft` is light on purpose: it loads neither torch, llama.cpp nor `openai`. The two client classes are
resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sdk import AsyncOpenAI as AsyncOpenAI
    from .sdk import OpenAI as OpenAI

__version__ = "0.1.0"
__all__ = ["AsyncOpenAI", "OpenAI", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("OpenAI", "AsyncOpenAI"):
        from . import sdk

        return getattr(sdk, name)
    raise AttributeError(f"module 'updraft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
