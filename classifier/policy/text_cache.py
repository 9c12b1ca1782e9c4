"""A cache of what was made of texts: callers decide how long these are."""

from __future__ import annotations

import sys
from typing import TypeVar

from ...protocol.safety.bounded_cache import BoundedCache
from ..features.gate_inputs import QUESTIONS_AT_ONCE

Value = TypeVar("Value")
_MAX_BYTES = 2**25
_GROWTH = 8  # bytes of what is made of a text, at most, for each byte of it; names and numbers in it are objects
_OVERHEAD = 2**16  # bytes of an entry whatever its text: n-gram counts


class TextCache(BoundedCache[str, Value]):
    def __init__(self, most: int = QUESTIONS_AT_ONCE, max_bytes: int = _MAX_BYTES) -> None:
        super().__init__(most, max_bytes, lambda text, _: _OVERHEAD + _GROWTH * sys.getsizeof(text))
