"""Ledgers in SQLite files: whose file it is, its format, and the migration of older formats."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from ...protocol.errors import ConfigurationError, StorageError
from ...protocol.safety.database import Database
from ...protocol.safety.shared_file import SharedFile
from ...protocol.wal import columns, transaction
from .table import LedgerTable, Table

_SIGNATURE = {"id", "model", "status", "latency_ms"}  # columns of every format
_READ_S = 2.0


def open_database(path: Path, table: LedgerTable, *, busy_s: float, read_only: bool = False) -> Database:
    """The ledger at `path`, migrated if its format is older.

    `busy_s`: how long a call waits for other writers; opening waits up to 5 seconds. `read_only`: change nothing, make
    no file, and show rows of an older format as this format has them. Raises ConfigurationError.
    """
    prepare = partial(_prepare_to_read if read_only else _prepare, path=path, table=table)
    file = SharedFile(path, f"as the {table.purpose}", table.param)
    return Database(file, prepare, busy_s=busy_s, read_only=read_only)


@contextmanager
def open_to_read(path: Path, table: LedgerTable) -> Generator[sqlite3.Connection]:
    """A connection that locks out no writer. Raises ConfigurationError, also for errors in the block."""
    try:
        with (
            closing(open_database(path, table, busy_s=_READ_S, read_only=True)) as database,
            database.use() as connection,
        ):
            yield connection
    except sqlite3.Error as error:
        raise ConfigurationError(f"The {table.purpose} {path} cannot be read: {error}.") from error


def _prepare(connection: sqlite3.Connection, path: Path, table: LedgerTable) -> None:
    """Bring the file to this format in one transaction, so that several processes may open it at once."""
    if _format(connection, path, table) == table.format:
        return
    with transaction(connection):
        file_format = _format(connection, path, table)
        if file_format < table.format:
            for each in (table, *table.others):
                _migrate(connection, each, file_format)
            connection.execute(f"PRAGMA user_version={table.format}")


def _migrate(connection: sqlite3.Connection, table: Table, file_format: int) -> None:
    """Make the table. Rows of one with other columns are copied into it."""
    found, older, (create, *indexes) = columns(connection, table.name), f"{table.name}_before", table.create()
    is_older = bool(found) and {*found} != {*table.columns}
    if is_older:
        connection.execute(f"ALTER TABLE {table.name} RENAME TO {older}")
    connection.execute(create)
    if is_older:
        rows = f"SELECT {table.selection(found, file_format)} FROM {older}"
        connection.execute(f"INSERT INTO {table.name} ({', '.join(table.columns)}) {rows}")
        connection.execute(f"DROP TABLE {older}")
    for index in indexes:
        connection.execute(index)


def _prepare_to_read(connection: sqlite3.Connection, path: Path, table: LedgerTable) -> None:
    """Let a temporary view of the table's name show an older format as this one. The file stays as it is."""
    file_format, found = _format(connection, path, table), columns(connection, table.name)
    if not found:  # its maker has not come further, or it was cut
        raise StorageError(f"The {table.purpose} {path} is empty: the next start fills it.", param=table.param)
    if {*found} != {*table.columns}:
        connection.execute("PRAGMA temp_store=MEMORY")
        rows = f"SELECT rowid AS rowid, {table.selection(found, file_format)} FROM main.{table.name}"
        connection.execute(f"CREATE TEMP VIEW {table.name} AS {rows}")


def _format(connection: sqlite3.Connection, path: Path, table: LedgerTable) -> int:
    """The file's format; 0 if it is empty, or from before formats had numbers.

    Raises ConfigurationError if it is newer, or another program's.
    """
    query = (  # one statement, so that no process writes in between
        "SELECT user_version, (SELECT count(*) FROM sqlite_schema),"
        " (SELECT group_concat(name) FROM pragma_table_info(?)) FROM pragma_user_version"
    )
    version, objects, names = connection.execute(query, (table.name,)).fetchone()
    if not 0 <= version <= table.format:
        raise ConfigurationError(
            f"The {table.purpose} {path} has format {version}, this version reads up to {table.format}:"
            " name another file.",
            param=table.param,
        )
    found = set[str](filter(None, (names or "").split(",")))
    is_table = found >= _SIGNATURE and (version > 0 or found <= {*table.columns})
    if not is_table and (version or objects):
        raise ConfigurationError(f"{path} is no {table.purpose} of Updraft: name another file.", param=table.param)
    return version
