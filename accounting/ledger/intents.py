"""Rows before their commit, in a mapped file that outlives its worker: a place for each request, no disk to wait for.

A place holds the row that the request gets if the worker dies: at first an abandoned row, at the end the settled one.
A kill in between leaves every place whole, since the length is stored last.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from struct import Struct

from ...protocol.decoding import UNREADABLE
from ...protocol.errors import DiskSpaceError, StorageError
from ...protocol.safety.private_files import private_file
from ...protocol.safety.system import reserve_blocks
from .table import LedgerTable, Values
from .workers import WorkerSlot, left_behind

_LENGTH = Struct("=I")
_log = logging.getLogger("updraft.ledger")


class IntentFile:
    """A file with `places` records of up to `place_bytes`. One thread adds records; another one may remove them."""

    def __init__(self, path: Path, places: int = 4096, place_bytes: int = 1024) -> None:
        """Open or create the file. Raises OSError, DiskSpaceError."""
        self._places, self._place_bytes = places, place_bytes
        self._room = place_bytes - _LENGTH.size
        file = os.open(private_file(path), os.O_RDWR | getattr(os, "O_BINARY", 0))
        try:
            reserve_blocks(file, path, places * place_bytes)
            self._memory = mmap.mmap(file, places * place_bytes)
        finally:
            os.close(file)
        taken = self.records()
        self._free = [place for place in reversed(range(places)) if place not in taken]

    def add(self, record: bytes) -> int | None:
        """The place of `record`; None if it is too long, or no place is free."""
        return self._add(record, spared=1)  # which `replace` needs

    def _add(self, record: bytes, spared: int) -> int | None:
        if len(record) > self._room or len(self._free) <= spared:
            return None
        place = self._free.pop()
        begin = place * self._place_bytes
        self._memory[begin + _LENGTH.size : begin + _LENGTH.size + len(record)] = record
        _LENGTH.pack_into(self._memory, begin, len(record))
        return place

    def replace(self, place: int, record: bytes) -> int:
        """The new place, after which the old one is free. A record without a place leaves the old record."""
        if (found := self._add(record, spared=0)) is None:
            return place
        self.remove(place)
        return found

    def remove(self, place: int) -> None:
        _LENGTH.pack_into(self._memory, place * self._place_bytes, 0)
        self._free.append(place)

    def records(self) -> dict[int, bytes]:
        """The records of the file, by place."""
        found: dict[int, bytes] = {}
        for place in range(self._places):
            begin = place * self._place_bytes
            (length,) = _LENGTH.unpack_from(self._memory, begin)
            if length:
                found[place] = self._memory[begin + _LENGTH.size : begin + _LENGTH.size + min(length, self._room)]
        return found

    def close(self) -> None:
        self._memory.close()


class KeptRows:
    """The file of this worker in `folder`, and the rows of dead workers."""

    def __init__(self, folder: Path, table: LedgerTable) -> None:
        """Raises StorageError, DiskSpaceError."""
        self._table = table
        self.slot = WorkerSlot(folder, table.max_workers)
        try:
            self.file = IntentFile(self.slot.intents, table.places, table.place_bytes)
        except DiskSpaceError:
            self.slot.close()
            raise
        except OSError as error:
            self.slot.close()
            raise StorageError(f"Cannot use {self.slot.intents} for the ledger: {error}.") from error
        self._left = self.file.records()  # by the worker that had this slot before

    def left_behind(self) -> Iterator[list[Values]]:
        """Rows that dead workers did not commit, worker by worker: each forgotten with the next step."""
        if self._left:
            yield _rows(self._left, self._table)
        while self._left:
            self.file.remove(self._left.popitem()[0])
        for path in left_behind(self.slot.folder, self._table.max_workers, self.slot.number):
            try:
                with closing(IntentFile(path, self._table.places, self._table.place_bytes)) as file:
                    records = file.records()
                yield _rows(records, self._table)
                path.unlink()
            except (OSError, DiskSpaceError) as error:
                _log.error("Rows that a dead worker may have left in %s are not in the ledger: %s", path, error)

    def close(self) -> None:
        self.slot.close()


def _rows(records: Mapping[int, bytes], table: LedgerTable) -> list[Values]:
    rows: list[Values] = []
    for record in records.values():
        try:
            rows.append(table.values_in(record))
        except (*UNREADABLE, ValueError) as error:
            _log.error("A request of a dead worker has no row: what it left is damaged (%s).", error)
    return rows
