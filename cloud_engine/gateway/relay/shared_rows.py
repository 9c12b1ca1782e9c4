"""Named numbers shared by the workers of a gateway. Each worker writes its own row, so no locks are needed.

A row is a table of slots, each a name with a fixed number of values. A replacement worker takes over the row.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from typing import TypeAlias

WIDTH = 72
"""Values per name."""

_NAME_BYTES = 384
_SLOT_BYTES = _NAME_BYTES + WIDTH * 8
_SLOTS = 1024  # slots per worker; enough for the maximum of all kinds of names together
_MAX_OF_A_KIND = {"key": 224, "model": 192, "node": 256, "status": 224}
_SEPARATOR = "\t"
_OTHER = "other"  # replaces the first label of names beyond the maximum of their kind
_FREE = 0xFF  # first byte of a released slot; no name starts with it

Name = tuple[str, ...]
"""Name of a metric: its kind, followed by the values of its labels."""

Numbers: TypeAlias = "memoryview[float]"


class SharedRows:
    """Rows in anonymous shared memory, for all processes forked from this one."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self._memory = memoryview(mmap.mmap(-1, workers * _SLOTS * _SLOT_BYTES))

    def row(self, worker: int) -> WorkerRow:
        size = _SLOTS * _SLOT_BYTES
        return WorkerRow(self._memory[worker * size : (worker + 1) * size])

    def named(self, kind: str) -> dict[Name, list[list[float]]]:
        """Return a mapping from the names of `kind` to their values, with one list per worker that has the name."""
        by_name: dict[Name, list[list[float]]] = {}
        for worker in range(self.workers):
            for (its_kind, *labels), numbers in self.row(worker).items():
                if its_kind == kind:
                    by_name.setdefault(tuple(labels), []).append(list(numbers))
        return by_name

    def sums(self, kind: str) -> dict[Name, list[float]]:
        """Return a mapping from the names of `kind` to their values, summed over the workers."""
        return {name: [sum(column) for column in zip(*rows, strict=True)] for name, rows in self.named(kind).items()}


class WorkerRow:
    """The slots of one worker. Once a kind is full, further names are counted as `other`."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._slots = dict(self.items())

    def items(self) -> Iterator[tuple[Name, Numbers]]:
        return ((name, self._numbers(start)) for start, name in self._places())

    def of(self, *name: str) -> Numbers:
        """Return the values of a name, which is a kind followed by label values."""
        numbers = self._slots.get(name)
        return self._added(name) if numbers is None else numbers

    def keep_only(self, kind: str, names: Collection[Name]) -> None:
        """Release the slots of all names of `kind` that are not in `names`."""
        gone = {name for name in self._slots if name[0] == kind} - set(names)
        if any(name not in self._slots for name in names):
            gone.discard((kind, _OTHER))
        for start, name in self._places() if gone else ():
            if name in gone:
                self._memory[start] = _FREE
                del self._slots[name]

    def _added(self, name: Name) -> Numbers:
        other = (name[0], _OTHER, *name[2:])
        encoded = _SEPARATOR.join(name).encode()
        of_kind = sum(slot[0] == name[0] for slot in self._slots) - (other in self._slots)
        has_capacity = of_kind < _MAX_OF_A_KIND.get(name[0], 32) or name == other
        is_sound = len(encoded) <= _NAME_BYTES and not any(_SEPARATOR in part or "\0" in part for part in name)
        if not (has_capacity and is_sound):
            return self.of(*other)
        start = next(at for at in range(0, len(self._memory), _SLOT_BYTES) if self._memory[at] in (0, _FREE))
        self._memory[start + _NAME_BYTES : start + _SLOT_BYTES] = bytes(WIDTH * 8)
        self._memory[start + 1 : start + _NAME_BYTES] = encoded[1:].ljust(_NAME_BYTES - 1, b"\0")
        self._memory[start] = encoded[0]  # publishes the slot to other workers
        self._slots[name] = self._numbers(start)
        return self._slots[name]

    def _places(self) -> Iterator[tuple[int, Name]]:
        """Yield the offset and the name of each used slot."""
        for start in range(0, len(self._memory), _SLOT_BYTES):
            name = bytes(self._memory[start : start + _NAME_BYTES])
            if not name[0]:
                return
            if name[0] != _FREE:
                yield start, tuple(name.rstrip(b"\0").decode(errors="replace").split(_SEPARATOR))

    def _numbers(self, start: int) -> Numbers:
        return self._memory[start + _NAME_BYTES : start + _SLOT_BYTES].cast("d")
