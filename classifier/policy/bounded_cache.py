"""A cache of results by text, bounded in entries and in bytes: callers decide how long texts are."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

from ..features.gate_inputs import QUESTIONS_AT_ONCE

Value = TypeVar("Value")
_MAX_BYTES = 2**25
_GROWTH = 8  # bytes of what is made of a text, at most, for each byte of it; names and numbers in it are objects
_OVERHEAD = 2**16  # bytes of an entry whatever its text: n-gram counts


class BoundedCache(Generic[Value]):
    """Least recently used entries go first; one that is larger than all of it is not kept. Thread-safe."""

    def __init__(self, most: int = QUESTIONS_AT_ONCE, max_bytes: int = _MAX_BYTES) -> None:
        self._most, self._max_bytes = most, max_bytes
        self._bytes = 0
        self._entries: OrderedDict[str, Value] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Value | None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def find(self, key: str, make: Callable[[str], Value]) -> Value:
        """The value of `key`, made by `make` if it is not kept."""
        found = self.get(key)
        if found is None:
            found = make(key)
            self.put(key, found)
        return found

    def put(self, key: str, value: Value) -> None:
        with self._lock:
            self._drop(key)
            self._entries[key] = value
            self._bytes += _size(key)
            while len(self._entries) > self._most or self._bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))

    def drop(self, key: str) -> None:
        with self._lock:
            self._drop(key)

    def _drop(self, key: str) -> None:
        if self._entries.pop(key, None) is not None:
            self._bytes -= _size(key)


def _size(key: str) -> int:
    return _OVERHEAD + _GROWTH * sys.getsizeof(key)
