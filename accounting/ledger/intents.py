"""Write-ahead records of ledger rows in a memory-mapped file, which survives a killed worker without disk flushes.

Each request has a slot with the row to commit if the worker dies. At first, the row says that the request was
abandoned. At the end, it is the settled row. A record's length is written last, so that a kill in between leaves every
slot consistent. Records that do not fit go to an overflow file. Committing a row twice is harmless.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from struct import Struct

from ...protocol.decoding import UNREADABLE
from ...protocol.errors import DiskSpaceError, StorageError
from ...protocol.safety.database import FORKS
from ...protocol.safety.private_files import private_file
from ...protocol.safety.system import reserve_blocks
from .table import BookedRow, LedgerTable
from .workers import WorkerSlot, orphaned_intents

_LENGTH = Struct("=I")
_SIGNED = Struct("=i")
_MAX_OVERFLOW = 256 * 2**20  # bytes
_log = logging.getLogger("updraft.ledger")


class OverflowFile:
    """An append-only file of records, truncated once all records are removed.

    Each record follows its length, which is negated when the record is removed. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._is_failing = False
        self._file = os.open(private_file(path), os.O_RDWR | getattr(os, "O_BINARY", 0))
        records, self._end = self._read()
        os.ftruncate(self._file, self._end)
        self._lengths = {at: len(record) for at, record in records.items()}
        FORKS.add(self)

    def add(self, record: bytes) -> int | None:
        """Append `record` and return its position; None if the write fails. The log reports the first failure only."""
        data = _SIGNED.pack(len(record)) + record
        with self._lock:
            at = self._end
            try:
                os.lseek(self._file, at, os.SEEK_SET)
                if at + len(data) > _MAX_OVERFLOW or os.write(self._file, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                if not self._is_failing:
                    _log.error("Cannot write %s: %s. Rows are only in memory until their commit.", self._path, error)
                self._is_failing = True
                with suppress(OSError):
                    os.ftruncate(self._file, at)
                return None
            self._is_failing = False
            self._end += len(data)
            self._lengths[at] = len(record)
            return at

    def remove(self, at: int) -> None:
        """Remove a record. Idempotent. If the write fails, the record may be committed again later."""
        with self._lock, suppress(OSError):
            length = self._lengths.pop(at, None)
            if not self._lengths:
                os.ftruncate(self._file, 0)
                self._end = 0
            elif length is not None:
                os.lseek(self._file, at, os.SEEK_SET)
                os.write(self._file, _SIGNED.pack(-length))

    def records(self) -> dict[int, bytes]:
        """Return the records, keyed by position."""
        with self._lock:
            return self._read()[0]

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._release()

    def before_fork(self, _: float, /) -> bool:
        return True

    def after_fork(self, in_child: bool, /) -> None:
        """Close the file in a forked child, which must not write to the parent's file."""
        if in_child:
            self._release()  # without the lock, which a thread that no longer exists in the child may hold

    def _release(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _read(self) -> tuple[dict[int, bytes], int]:
        """Return the complete records and the offset after the last one; a kill may have torn a record."""
        records: dict[int, bytes] = {}
        os.lseek(self._file, 0, os.SEEK_SET)
        at, data = 0, os.read(self._file, os.fstat(self._file).st_size)
        while at + _SIGNED.size <= len(data):
            (length,) = _SIGNED.unpack_from(data, at)
            begin, end = at + _SIGNED.size, at + _SIGNED.size + abs(length)
            if length == 0 or end > len(data):
                break
            if length > 0:
                records[at] = data[begin:end]
            at = end
        return records, at


class IntentFile:
    """A mapped file of `places` slots of `place_bytes` each, plus an overflow file for records that do not fit.

    One thread adds records; another may remove them.
    """

    def __init__(self, path: Path, places: int = 4096, place_bytes: int = 1024) -> None:
        """Open or create the file. Raises OSError, DiskSpaceError."""
        self._places, self._place_bytes = places, place_bytes
        self._capacity = place_bytes - _LENGTH.size
        file = os.open(private_file(path), os.O_RDWR | getattr(os, "O_BINARY", 0))
        try:
            reserve_blocks(file, path, places * place_bytes)
            self._memory = mmap.mmap(file, places * place_bytes)
        finally:
            os.close(file)
        self.overflow = OverflowFile(_overflow(path))
        taken = self._mapped()
        self._free = [place for place in reversed(range(places)) if place not in taken]

    def add(self, record: bytes) -> int | None:
        """Store `record` and return its place; None if the disk is full."""
        if len(record) > self._capacity or not self._free:
            at = self.overflow.add(record)
            return None if at is None else self._places + at
        place = self._free.pop()
        begin = place * self._place_bytes
        self._memory[begin + _LENGTH.size : begin + _LENGTH.size + len(record)] = record
        _LENGTH.pack_into(self._memory, begin, len(record))
        return place

    def replace(self, place: int, record: bytes) -> int:
        """Replace the record at `place`, and return the new record's place. On failure the old record stays."""
        if (moved := self.add(record)) is None:
            return place
        self.remove(place)
        return moved

    def remove(self, place: int) -> None:
        if place >= self._places:
            self.overflow.remove(place - self._places)
            return
        _LENGTH.pack_into(self._memory, place * self._place_bytes, 0)
        self._free.append(place)

    def records(self) -> dict[int, bytes]:
        """Return the records of both files, keyed by place."""
        return {**self._mapped(), **{self._places + at: record for at, record in self.overflow.records().items()}}

    def _mapped(self) -> dict[int, bytes]:
        records: dict[int, bytes] = {}
        for place in range(self._places):
            begin = place * self._place_bytes
            (length,) = _LENGTH.unpack_from(self._memory, begin)
            if length:
                records[place] = self._memory[begin + _LENGTH.size : begin + _LENGTH.size + min(length, self._capacity)]
        return records

    def close(self) -> None:
        self.overflow.close()
        self._memory.close()


class WorkerIntents:
    """The intent file of this worker in `folder`, and the rows left by dead workers."""

    def __init__(self, folder: Path, table: LedgerTable) -> None:
        """Take a worker slot and open its intent file. Raises StorageError, DiskSpaceError."""
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
        self._left = self.file.records()  # records of the previous owner of this slot

    def orphaned_rows(self) -> Iterator[list[BookedRow]]:
        """Yield the uncommitted rows of each dead worker. Advancing the iterator deletes the rows last yielded."""
        if self._left:
            yield _rows(self._left, self._table)
        while self._left:
            self.file.remove(self._left.popitem()[0])
        for path in orphaned_intents(self.slot.folder, self._table.max_workers, self.slot.number):
            try:
                with closing(IntentFile(path, self._table.places, self._table.place_bytes)) as file:
                    records = file.records()
                yield _rows(records, self._table)
                _overflow(path).unlink()
                path.unlink()
            except (OSError, DiskSpaceError) as error:
                _log.error("Cannot collect the rows of a dead worker from %s: %s", path, error)

    def close(self) -> None:
        self.file.overflow.close()  # late calls may still use the mapping, which garbage collection closes
        self.slot.close()


def _overflow(path: Path) -> Path:
    return path.with_name(f"overflow-{path.name}")


def _rows(records: Mapping[int, bytes], table: LedgerTable) -> list[BookedRow]:
    rows: list[BookedRow] = []
    for record in records.values():
        try:
            rows.append(table.row_in(record))
        except (*UNREADABLE, ValueError) as error:
            _log.error("The row of a request is lost: the record of a dead worker is damaged (%s).", error)
    return rows
