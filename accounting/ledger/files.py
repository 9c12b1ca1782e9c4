"""Ledgers in SQLite files: validation, format version, and migration of older formats."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from ...protocol.errors import ConfigurationError, StorageError
from ...protocol.safety.database import Database, SharedFile, columns, transaction
from .table import LedgerTable, Table

_SIGNATURE = {"id", "model", "status", "latency_ms"}  # columns present in every format
_READ_S = 2.0
#: Beginnings of database names that are not paths of files.
NOT_FILES = (":memory:", "file:", "sqlite:", "postgresql:", "postgres:")


def open_database(path: Path, table: LedgerTable, *, busy_s: float, read_only: bool = False) -> Database:
    """Open the ledger at `path`, and migrate it if the format is older.

    `busy_s`: how long a call waits for other writers; opening waits up to 5 seconds. `read_only`: leave the file
    unchanged, create none, and convert rows of an older format on the fly. Raises ConfigurationError.
    """
    prepare = partial(_prepare_to_read if read_only else _prepare, path=path, table=table)
    file = SharedFile(path, f"as the {table.purpose}", table.param)
    return Database(file, prepare, busy_s=busy_s, read_only=read_only)


@contextmanager
def open_to_read(path: Path, table: LedgerTable) -> Generator[sqlite3.Connection]:
    """Yield a read-only connection that blocks no writer. SQLite errors in the block become ConfigurationError."""
    try:
        with (
            closing(open_database(path, table, busy_s=_READ_S, read_only=True)) as database,
            database.use() as connection,
        ):
            yield connection
    except sqlite3.Error as error:
        raise ConfigurationError(f"The {table.purpose} {path} cannot be read: {error}.") from error


def _prepare(connection: sqlite3.Connection, path: Path, table: LedgerTable) -> None:
    """Migrate the file to the current format in one transaction, safe against concurrent openers."""
    if _format(connection, path, table) == table.format:
        return
    with transaction(connection):
        file_format = _format(connection, path, table)
        if file_format < table.format:
            for each in (table, *table.side_tables):
                _migrate(connection, each, file_format)
            connection.execute(f"PRAGMA user_version={table.format}")


def _migrate(connection: sqlite3.Connection, table: Table, file_format: int) -> None:
    """Create the table, and copy rows from an existing table with other columns."""
    existing, older, (create, *indexes) = columns(connection, table.name), f"{table.name}_before", table.create()
    is_older = bool(existing) and {*existing} != {*table.columns}
    if is_older:
        connection.execute(f"ALTER TABLE {table.name} RENAME TO {older}")
    connection.execute(create)
    if is_older:
        rows = f"SELECT {table.selection(existing, file_format)} FROM {older}"
        connection.execute(f"INSERT INTO {table.name} ({', '.join(table.columns)}) {rows}")
        connection.execute(f"DROP TABLE {older}")
    for index in indexes:
        connection.execute(index)


def _prepare_to_read(connection: sqlite3.Connection, path: Path, table: LedgerTable) -> None:
    """Present an older format as the current one, through a temporary view. The file is not changed."""
    file_format, existing = _format(connection, path, table), columns(connection, table.name)
    if not existing:  # another process has only just created the file, or the file was truncated
        raise StorageError(f"The {table.purpose} {path} is empty: the next start initialises it.", param=table.param)
    if {*existing} != {*table.columns}:
        connection.execute("PRAGMA temp_store=MEMORY")
        rows = f"SELECT rowid AS rowid, {table.selection(existing, file_format)} FROM main.{table.name}"
        connection.execute(f"CREATE TEMP VIEW {table.name} AS {rows}")


def _format(connection: sqlite3.Connection, path: Path, table: LedgerTable) -> int:
    """Return the file's format; 0 for an empty file or one that predates format numbers.

    Raises ConfigurationError if the format is newer, or the file belongs to another program.
    """
    query = (  # one statement, so that no other process can write in between
        "SELECT user_version, (SELECT count(*) FROM sqlite_schema),"
        " (SELECT group_concat(name) FROM pragma_table_info(?)) FROM pragma_user_version"
    )
    version, objects, names = connection.execute(query, (table.name,)).fetchone()
    if not 0 <= version <= table.format:
        raise ConfigurationError(
            f"The {table.purpose} {path} has format {version}, but this version supports up to {table.format}:"
            " upgrade Updraft or name another file.",
            param=table.param,
        )
    existing = set[str](filter(None, (names or "").split(",")))
    is_table = existing >= _SIGNATURE and (version > 0 or existing <= {*table.columns})
    if not is_table and (version or objects):
        raise ConfigurationError(f"{path} is not a {table.purpose} of Updraft: name another file.", param=table.param)
    return version
