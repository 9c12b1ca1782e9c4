"""Stores of ledger rows: what all databases share, and SQLite, which needs no server."""

from __future__ import annotations

import logging
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from ...protocol.errors import ConfigurationError, DiskSpaceError
from ...protocol.wal import transaction
from .files import open_database
from .intents import IntentFile, KeptRows
from .table import LedgerTable, Values
from .workers import left_behind

ExtraWrite = Callable[[sqlite3.Connection], None]
"""A change that belongs to a row: both are committed, or none."""

_REFUSALS = (sqlite3.DataError, sqlite3.InterfaceError, sqlite3.IntegrityError, sqlite3.ProgrammingError)
_log = logging.getLogger("updraft.ledger")


class LedgerWriteError(Exception):
    """The database cannot be written now, and may be later."""


class RowRefusedError(Exception):
    """The database refuses one of the rows for good."""


class LedgerStore(ABC):
    """One connection to the database, which one thread uses at a time."""

    # Whether an intent is a row of the database, and survives this machine.
    commits_intents = False

    def __init__(self, table: LedgerTable, kept: KeptRows | None, worker: str) -> None:
        self.table = table
        #: The id of this process in its rows.
        self.worker = worker
        self._kept = kept

    @property
    def intents(self) -> IntentFile | None:
        """The rows that are not committed yet. None: these are kept in memory alone."""
        return None if self._kept is None else self._kept.file

    @abstractmethod
    def check(self) -> None:
        """Raises ConfigurationError where the database cannot be used."""

    @abstractmethod
    def write(self, intents: Sequence[Values], settled: Sequence[Values], extras: Sequence[ExtraWrite] = ()) -> None:
        """Commit all, or raise LedgerWriteError or RowRefusedError. A settled row stays as it is."""

    def left_behind(self) -> Iterator[list[Values]]:
        """As `KeptRows`. Raises LedgerWriteError."""
        try:
            if self._kept is not None:
                yield from self._kept.left_behind()
        except OSError as error:
            raise LedgerWriteError(str(error)) from error

    @abstractmethod
    def abandon(self) -> int:
        """Mark the intents of dead workers. Returns their number."""

    @abstractmethod
    def prune(self, before: float, most: int) -> int:
        """Delete up to `most` of the rows before a time. Returns their number."""

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()


class SqliteStore(LedgerStore):
    """A file that several processes write (WAL): a commit survives the death of each of them.

    `needs_intents`: whether a folder for the intent files is required, or the rows may be in memory alone without it.
    Raises ConfigurationError, DiskSpaceError.
    """

    def __init__(self, path: Path, table: LedgerTable, *, needs_intents: bool = True) -> None:
        self._database, kept = open_database(path, table, busy_s=table.busy_s), None
        try:
            kept = KeptRows(_workers_folder(path), table)
        except (ConfigurationError, DiskSpaceError) as error:
            if needs_intents:
                self._database.close()
                raise
            _log.warning("Requests are not in the ledger if this process is killed while it waits: %s", error)
        super().__init__(table, kept, "" if kept is None else kept.slot.id)

    def check(self) -> None:
        """Return at once: the file was opened."""

    def write(self, intents: Sequence[Values], settled: Sequence[Values], extras: Sequence[ExtraWrite] = ()) -> None:
        try:
            with self._connected() as connection, transaction(connection):
                if intents:
                    connection.executemany(self.table.insert("?", settle=False), intents)
                connection.executemany(self.table.insert("?", settle=True), settled)
                for extra in extras:
                    extra(connection)
        except (OverflowError, UnicodeError) as error:
            raise RowRefusedError(str(error)) from error

    def abandon(self) -> int:
        if self.table.state is None or self._kept is None:
            return 0
        with self._connected() as connection:
            live = self._kept.slot.live_ids()
            where = f"{self.table.state} = 'intent' AND worker NOT IN ({', '.join('?' for _ in live)})"
            query = f"UPDATE {self.table.name} SET {self.table.state} = 'abandoned' WHERE {where}"
            return connection.execute(query, live).rowcount

    def prune(self, before: float, most: int) -> int:
        name = self.table.name
        old = f"SELECT rowid FROM {name} WHERE started_at < ? ORDER BY started_at LIMIT ?"
        with self._connected() as connection:
            if connection.execute(old, (before, 1)).fetchone() is None:
                return 0  # without a lock on the file
            return connection.execute(f"DELETE FROM {name} WHERE rowid IN ({old})", (before, most)).rowcount

    def close(self) -> None:
        self._database.close()
        super().close()

    @contextmanager
    def _connected(self) -> Generator[sqlite3.Connection]:
        """Raises LedgerWriteError or RowRefusedError for errors in the block."""
        try:
            with self._database.use() as connection:
                yield connection
        except _REFUSALS as error:
            raise RowRefusedError(str(error)) from error
        except (sqlite3.Error, OSError) as error:
            raise LedgerWriteError(str(error)) from error


def collect(path: Path, table: LedgerTable) -> None:
    """Commit the rows that dead processes left beside the file at `path`, if there are any.

    Raises ConfigurationError, OSError, LedgerWriteError or RowRefusedError. Rows that cannot be committed stay.
    """
    with closing(left_behind(_workers_folder(path), table.max_workers, None)) as found:
        if next(found, None) is None:
            return
    with closing(SqliteStore(path, table)) as store:
        for rows in store.left_behind():
            store.write((), rows)


def _workers_folder(path: Path) -> Path:
    """The folder for the locks and intents of the processes that write the file at `path`."""
    return path.with_name(f"{path.name}.workers")
