"""Stores of usage rows: what a database must offer, and SQLite, which offers it without a server."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Protocol

from ....protocol.errors import ConfigurationError
from ....protocol.safety.shared_file import SharedFile
from ....protocol.wal import columns, transaction
from .intents import IntentFile, KeptRows
from .metering import COLUMNS, UsageRow, Values
from .older_format import put_aside, take_over

VERSION = 1
"""Of the schema. A file of another version is refused."""

_BUSY_S = 2.0
#: Columns that an intent has already.
_OF_INTENT = frozenset(("id", "request_id", "key_name", "model", "started_at", "tier", "key_id", "tenant", "worker"))
_TYPES = {"str": "TEXT", "State": "TEXT", "int": "INTEGER", "float": "REAL", "float | None": "REAL"}


class LedgerWriteError(Exception):
    """The database cannot be written now, and may be later."""


class RowRefusedError(Exception):
    """The database does not take one of the rows, and never will."""


class UsageStore(Protocol):
    """One connection to the database, which one thread uses at a time."""

    # The id of this process in its rows.
    worker: str

    # Whether an intent is a row of the database, and survives this machine.
    commits_intents: bool
    # Where rows stand that are not committed yet.
    intents: IntentFile

    def check(self) -> None:
        """Raises ConfigurationError where the database cannot be used."""
        ...

    def write(self, intents: Sequence[Values], settled: Sequence[Values]) -> None:
        """Commit all, or raise LedgerWriteError or RowRefusedError. A row that is settled stays as it is."""
        ...

    def left_behind(self) -> Iterator[list[Values]]:
        """As `KeptRows`. Raises LedgerWriteError."""
        ...

    def abandon(self) -> int:
        """Mark the intents of dead workers. How many there were."""
        ...

    def prune(self, before: float, most: int) -> int:
        """Delete up to `most` of the rows before a time. How many there were."""
        ...

    def close(self) -> None: ...


def create_table(types: dict[str, str]) -> list[str]:
    """The statements that make the schema, with the database's word for each of our types."""
    made = ", ".join(f"{column.name} {types[_TYPES[str(column.type)]]}" for column in fields(UsageRow))
    return [
        f"CREATE TABLE IF NOT EXISTS usage ({made}, PRIMARY KEY (id))",
        "CREATE INDEX IF NOT EXISTS usage_key ON usage (key_id, started_at)",
        "CREATE INDEX IF NOT EXISTS usage_time ON usage (started_at)",
        "CREATE INDEX IF NOT EXISTS usage_intents ON usage (worker) WHERE state = 'intent'",
        "CREATE TABLE IF NOT EXISTS usage_schema (version INTEGER NOT NULL)",
    ]


def insert(mark: str, *, settle: bool) -> str:
    marks, names = ", ".join(mark for _ in COLUMNS), ", ".join(COLUMNS)
    updates = ", ".join(f"{name} = excluded.{name}" for name in COLUMNS if name not in _OF_INTENT)
    action = f"UPDATE SET {updates} WHERE usage.state <> 'settled'" if settle else "NOTHING"
    return f"INSERT INTO usage ({names}) VALUES ({marks}) ON CONFLICT (id) DO {action}"


class SqliteStore:
    """A file that several processes write (WAL): a commit survives the death of each of them."""

    _INTENT, _SETTLE = insert("?", settle=False), insert("?", settle=True)
    commits_intents = False

    def __init__(self, path: Path) -> None:
        """Raises ConfigurationError."""
        file = SharedFile(path, "as the usage database", "db", _BUSY_S)
        self._connection = file.open(lambda connection: _create(connection, path))
        self._kept = KeptRows(path.with_name(f"{path.name}.workers"))
        self.worker, self.intents = self._kept.slot.id, self._kept.file

    def check(self) -> None:
        """It was opened."""

    def write(self, intents: Sequence[Values], settled: Sequence[Values]) -> None:
        try:
            with transaction(self._connection) as connection:
                connection.executemany(self._INTENT, intents)
                connection.executemany(self._SETTLE, settled)
        except (sqlite3.OperationalError, sqlite3.DatabaseError) as error:
            if isinstance(error, sqlite3.DataError | sqlite3.InterfaceError | sqlite3.ProgrammingError):
                raise RowRefusedError(str(error)) from error
            raise LedgerWriteError(str(error)) from error
        except (OverflowError, UnicodeError) as error:
            raise RowRefusedError(str(error)) from error

    def left_behind(self) -> Iterator[list[Values]]:
        try:
            yield from self._kept.left_behind()
        except OSError as error:
            raise LedgerWriteError(str(error)) from error

    def abandon(self) -> int:
        try:
            live = self._kept.slot.live_ids()
        except OSError as error:
            raise LedgerWriteError(str(error)) from error
        marks = ", ".join("?" for _ in live)
        query = f"UPDATE usage SET state = 'abandoned' WHERE state = 'intent' AND worker NOT IN ({marks})"
        return self._changed(query, *live)

    def prune(self, before: float, most: int) -> int:
        query = "DELETE FROM usage WHERE id IN (SELECT id FROM usage WHERE started_at < ? ORDER BY started_at LIMIT ?)"
        return self._changed(query, before, most)

    def close(self) -> None:
        self._connection.close()
        self._kept.slot.close()

    def _changed(self, query: str, *values: object) -> int:
        try:
            return self._connection.execute(query, values).rowcount
        except sqlite3.Error as error:
            raise LedgerWriteError(str(error)) from error


def _create(connection: sqlite3.Connection, path: Path) -> None:
    with transaction(connection):
        is_older = put_aside(connection)
        if columns(connection, "usage") not in ((), COLUMNS):
            raise ConfigurationError(f"{path} is a usage database of another version: choose another --db.")
        for statement in create_table({type_: type_ for type_ in _TYPES.values()}):
            connection.execute(statement)
        if is_older:
            take_over(connection)
        found = connection.execute("SELECT version FROM usage_schema").fetchone()
        if found is None:
            connection.execute("INSERT INTO usage_schema VALUES (?)", (VERSION,))
        elif found[0] != VERSION:
            raise ConfigurationError(f"{path} has schema {found[0]}, this version has {VERSION}: choose another --db.")
