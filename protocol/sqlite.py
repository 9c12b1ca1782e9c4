"""Helpers for SQLite files shared by processes: write-ahead log, transactions, and schema inspection."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager

_BUSY_TIMEOUT_S, _PAUSE_S = 5.0, 0.01


def use_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL mode, in which commits survive a crash of the process. SQLite's busy timeout does not
    apply to the switch: a new file is "locked" at once while another connection switches. This function retries for up
    to 5 seconds. Raises sqlite3.OperationalError."""
    until = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)
    connection.execute("PRAGMA synchronous=NORMAL")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Generator[sqlite3.Connection]:
    """Run the block in a transaction that excludes other writers; roll back if the block raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # on a full disk, SQLite has already rolled back
            connection.execute("ROLLBACK")
        raise


def create_tables(connection: sqlite3.Connection, schema: Iterable[str]) -> None:
    """Execute the statements of `schema` in one transaction, so that several processes may open a new file at once."""
    with transaction(connection):
        for statement in schema:
            connection.execute(statement)


def tables(connection: sqlite3.Connection) -> frozenset[str]:
    return frozenset(name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'"))


def columns(connection: sqlite3.Connection, table: str) -> tuple[str, ...]:
    """Return the names of the columns of `table`, in order."""
    return tuple(name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,)))
