"""Rows before their commit, in a mapped file that outlives its worker: a place for each request, no disk to wait for.

What stands there is the row that the request gets if the worker dies: at first an abandoned one, at its end the settled
one. A kill in between leaves every place whole: its length is stored last.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from struct import Struct

from ....protocol.decoding import UNREADABLE
from ....protocol.errors import ConfigurationError, DiskSpaceError
from ....protocol.safety.private_files import private_file
from ....protocol.safety.system import reserve_blocks
from .metering import Values, values_in
from .workers import WorkerSlot

_PLACES = 4096
_PLACE_BYTES = 1024
_BYTES = _PLACES * _PLACE_BYTES
_LENGTH = Struct("=I")
_ROOM = _PLACE_BYTES - _LENGTH.size
_log = logging.getLogger("updraft.gateway")


class IntentFile:
    """One thread adds; another one may remove."""

    def __init__(self, path: Path) -> None:
        """The file that is there, or a new one. Raises OSError, DiskSpaceError."""
        file = os.open(private_file(path), os.O_RDWR | getattr(os, "O_BINARY", 0))
        try:
            reserve_blocks(file, path, _BYTES)
            self._memory = mmap.mmap(file, _BYTES)
        finally:
            os.close(file)
        taken = self.records()
        self._free = [place for place in reversed(range(_PLACES)) if place not in taken]

    def add(self, record: bytes) -> int | None:
        """The place of `record`; None if it is too long, or no place is free."""
        return self._add(record, spared=1)  # which `replace` needs

    def _add(self, record: bytes, spared: int) -> int | None:
        if len(record) > _ROOM or len(self._free) <= spared:
            return None
        place = self._free.pop()
        begin = place * _PLACE_BYTES
        self._memory[begin + _LENGTH.size : begin + _LENGTH.size + len(record)] = record
        _LENGTH.pack_into(self._memory, begin, len(record))
        return place

    def replace(self, place: int, record: bytes) -> int:
        """The new place, behind which the old one is free. What finds no place leaves the old record."""
        if (found := self._add(record, spared=0)) is None:
            return place
        self.remove(place)
        return found

    def remove(self, place: int) -> None:
        _LENGTH.pack_into(self._memory, place * _PLACE_BYTES, 0)
        self._free.append(place)

    def records(self) -> dict[int, bytes]:
        """What stands in the file, by place."""
        found: dict[int, bytes] = {}
        for place in range(_PLACES):
            begin = place * _PLACE_BYTES
            (length,) = _LENGTH.unpack_from(self._memory, begin)
            if length:
                found[place] = self._memory[begin + _LENGTH.size : begin + _LENGTH.size + min(length, _ROOM)]
        return found

    def close(self) -> None:
        self._memory.close()


class KeptRows:
    """The file of this worker in `folder`, and what those of dead ones hold."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigurationError, DiskSpaceError."""
        self.slot = WorkerSlot(folder)
        try:
            self.file = IntentFile(self.slot.intents)
        except OSError as error:
            raise ConfigurationError(f"Cannot use {self.slot.intents} for the ledger: {error}.") from error
        self._left = self.file.records()  # by the worker that had this slot before

    def left_behind(self) -> Iterator[list[Values]]:
        """Rows that dead workers did not commit, worker by worker: each forgotten with the next step."""
        if self._left:
            yield _rows(self._left)
        while self._left:
            self.file.remove(self._left.popitem()[0])
        for path in self.slot.left_behind():
            try:
                with closing(IntentFile(path)) as file:
                    records = file.records()
                yield _rows(records)
                path.unlink()
            except (OSError, DiskSpaceError) as error:
                _log.error("Rows that a dead worker may have left in %s are not in the ledger: %s", path, error)


def _rows(records: Mapping[int, bytes]) -> list[Values]:
    rows: list[Values] = []
    for record in records.values():
        try:
            rows.append(values_in(record))
        except (*UNREADABLE, ValueError) as error:
            _log.error("A request of a dead worker has no row: what it left is damaged (%s).", error)
    return rows
