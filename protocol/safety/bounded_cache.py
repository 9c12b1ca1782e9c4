"""LRU cache bounded in entries and in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BoundedCache(Generic[Key, Value]):
    """Thread-safe LRU cache. An entry larger than the whole cache is not stored."""

    def __init__(
        self, most: int, max_bytes: int = 0, size: Callable[[Key, Value], int] = lambda _key, _value: 0
    ) -> None:
        """Create an empty cache. `size` returns the size of an entry in bytes."""
        self._most, self._max_bytes, self._size = most, max_bytes, size
        self._bytes = 0
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def find(self, key: Key, make: Callable[[Key], Value]) -> Value:
        """Return the value of `key`; create and store it with `make` if missing."""
        value = self.get(key)
        if value is None:
            value = make(key)
            self.put(key, value)
        return value

    def put(self, key: Key, value: Value) -> None:
        size = self._size(key, value)
        with self._lock:
            self._drop(key)
            if size > self._max_bytes:
                return
            self._entries[key] = value
            self._bytes += size
            while len(self._entries) > self._most or self._bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))

    def drop(self, key: Key) -> None:
        with self._lock:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        if key in self._entries:
            self._bytes -= self._size(key, self._entries.pop(key))
