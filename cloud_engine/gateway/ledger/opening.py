"""Opens the usage database that `--ledger` names: a SQLite file or a PostgreSQL URL."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ....accounting.ledger.files import NOT_FILES, open_to_read
from ....accounting.ledger.reader import LedgerReader
from ....accounting.ledger.store import LedgerStore, SqliteStore
from ....protocol.errors import ConfigurationError
from .metering import USAGE


def is_url(database: str | Path, option: str = "ledger") -> bool:
    """Return whether `database` is a PostgreSQL URL. Raises ConfigurationError for a URL of another database."""
    name = str(database)
    is_postgres = name.startswith(("postgresql://", "postgres://"))
    if is_postgres or not ("://" in name or name.startswith(NOT_FILES)):
        return is_postgres
    raise ConfigurationError(f"--{option} must be a file, or a URL that begins with postgresql://.", param=option)


def open_store(database: str | Path) -> LedgerStore:
    """Open the usage database to write. Raises ConfigurationError, or MissingDependencyError (no PostgreSQL client)."""
    if is_url(database):
        from ....accounting.ledger.postgres import PostgresStore

        return PostgresStore(str(database), USAGE)
    return SqliteStore(Path(database), USAGE)


def open_reader(database: str | Path, option: str = "ledger") -> LedgerReader:
    """Open the usage database to read. Raises MissingDependencyError if the PostgreSQL client is not installed."""
    if is_url(database, option):
        from ....accounting.ledger import postgres

        day = "to_char(to_timestamp(started_at) AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
        return LedgerReader(USAGE, partial(postgres.open_to_read, str(database)), "%s", day, rowid="id")
    return LedgerReader(USAGE, partial(open_to_read, Path(database), USAGE))
