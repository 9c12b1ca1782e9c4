"""Stores of ledger rows: the common interface, and the SQLite store."""

from __future__ import annotations

import logging
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ...protocol.errors import ConfigurationError, DiskSpaceError
from ...protocol.safety.database import transaction
from .files import open_database
from .intents import IntentFile, WorkerIntents
from .table import BookedRow, LedgerTable, Values
from .workers import orphaned_intents

_REFUSALS = (sqlite3.DataError, sqlite3.InterfaceError, sqlite3.IntegrityError, sqlite3.ProgrammingError)
_log = logging.getLogger("updraft.ledger")


class LedgerWriteError(Exception):
    """The database cannot be written at the moment; a retry may succeed."""


class RowRefusedError(Exception):
    """The database permanently refuses one of the rows."""


class LedgerStore(ABC):
    """A connection to the ledger's database, for one thread at a time."""

    # Whether intents (rows of requests in flight) are committed to the database and survive a loss of this machine.
    commits_intents = False
    # SQL clause that skips rows that another connection is deleting.
    skips_locked = ""

    def __init__(self, table: LedgerTable, kept: WorkerIntents | None, worker: str) -> None:
        self.table = table
        #: Id of this process in ledger rows.
        self.worker = worker
        self._kept = kept

    @property
    def intents(self) -> IntentFile | None:
        """File of uncommitted rows, or None if uncommitted rows are only in memory."""
        return None if self._kept is None else self._kept.file

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigurationError if the database cannot be used."""

    @abstractmethod
    def write(self, intents: Sequence[Values], settled: Sequence[BookedRow]) -> None:
        """Commit all rows, or raise LedgerWriteError or RowRefusedError. A row that is already settled is neither
        changed nor booked again."""

    def orphaned_rows(self) -> Iterator[list[BookedRow]]:
        """Yield the uncommitted rows of dead workers, as documented in `WorkerIntents`. Raises LedgerWriteError."""
        try:
            if self._kept is not None:
                yield from self._kept.orphaned_rows()
        except OSError as error:
            raise LedgerWriteError(str(error)) from error

    @abstractmethod
    def abandon(self) -> int:
        """Mark intents (rows of unfinished requests) of dead workers as abandoned. Return the number of rows."""

    def newest(self, until: float) -> float | None:
        """Return the start time of the newest row that is not later than `until`, or None. Raises LedgerWriteError."""
        ((newest,),) = self._run(f"SELECT max(started_at) FROM {self.table.name} WHERE started_at <= ?", until)
        return newest

    def prune(self, before: float, most: int) -> int:
        """Delete up to `most` rows older than `before`, and return their number. Raises LedgerWriteError."""
        name = self.table.name
        old = f"SELECT id FROM {name} WHERE started_at < ? ORDER BY started_at LIMIT ?"
        if not self._run(old, before, 1):  # no rows to delete: do not take the write lock
            return 0
        return len(self._run(f"DELETE FROM {name} WHERE id IN ({old}{self.skips_locked}) RETURNING id", before, most))

    @abstractmethod
    def _run(self, query: str, *values: object) -> list[Any]:
        """Run a statement with `?` as placeholders, and return its rows. Raises LedgerWriteError."""

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()


class SqliteStore(LedgerStore):
    """A SQLite file shared by several processes (WAL). A commit survives the death of any process.

    `is_strict`: fail if the folder for intent files cannot be used, and write no file that was moved, replaced, deleted
    or emptied. If not strict, such a file is written, and without the folder, uncommitted rows are in memory only.
    Raises ConfigurationError, DiskSpaceError.
    """

    def __init__(self, path: Path, table: LedgerTable, *, is_strict: bool = True) -> None:
        self._is_strict = is_strict
        self._database, kept = open_database(path, table, busy_s=table.busy_s), None
        try:
            kept = WorkerIntents(_workers_folder(path), table)
        except (ConfigurationError, DiskSpaceError) as error:
            if is_strict:
                self._database.close()
                raise
            _log.warning("Uncommitted ledger rows would be lost if this process were killed: %s", error)
        super().__init__(table, kept, "" if kept is None else kept.slot.id)

    def check(self) -> None:
        """Do nothing, because the file was already opened."""

    def write(self, intents: Sequence[Values], settled: Sequence[BookedRow]) -> None:
        if self._is_strict and (lost := self._database.displaced()) is not None:
            raise LedgerWriteError(f"{lost} was moved, replaced, deleted or emptied; put it back, or restart")
        try:
            with self._connected() as connection, transaction(connection):
                connection.executemany(self.table.insert("?", settle=False), intents)
                insert = self.table.insert("?", settle=True)
                for row in settled:
                    if connection.execute(insert, row.values).rowcount and row.bookings:
                        connection.executemany(self.table.booking, row.bookings)
        except (OverflowError, UnicodeError) as error:
            raise RowRefusedError(str(error)) from error

    def abandon(self) -> int:
        if self.table.state is None or self._kept is None:
            return 0
        live = self._kept.slot.live_ids()
        where = f"{self.table.state} = 'intent' AND worker NOT IN ({', '.join('?' for _ in live)})"
        query = f"UPDATE {self.table.name} SET {self.table.state} = 'abandoned' WHERE {where} RETURNING id"
        return len(self._run(query, *live))

    def _run(self, query: str, *values: object) -> list[Any]:
        with self._connected() as connection:
            return connection.execute(query, values).fetchall()

    def close(self) -> None:
        self._database.close()
        super().close()

    @contextmanager
    def _connected(self) -> Generator[sqlite3.Connection]:
        """Yield a connection. Raises LedgerWriteError or RowRefusedError for errors in the block."""
        try:
            with self._database.use() as connection:
                yield connection
        except _REFUSALS as error:
            raise RowRefusedError(str(error)) from error
        except (sqlite3.Error, OSError) as error:
            raise LedgerWriteError(str(error)) from error


def collect(path: Path, table: LedgerTable) -> None:
    """Commit the rows that dead processes left beside the ledger at `path`, if any.

    Raises ConfigurationError, OSError, LedgerWriteError or RowRefusedError. Rows that cannot be committed are kept.
    """
    with closing(orphaned_intents(_workers_folder(path), table.max_workers, None)) as files:
        if next(files, None) is None:
            return
    with closing(SqliteStore(path, table)) as store:
        for rows in store.orphaned_rows():
            store.write((), rows)


def _workers_folder(path: Path) -> Path:
    """Return the folder for locks and intents of the processes that write the ledger at `path`, which may be a link."""
    file = Path(os.path.realpath(path))
    return file.with_name(f"{file.name}.workers")
