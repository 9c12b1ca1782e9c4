"""The database that `--db` names: a SQLite file, or PostgreSQL by its URL."""

from __future__ import annotations

from pathlib import Path

from ....accounting.ledger.store import LedgerStore, SqliteStore
from .reading import UsageReader
from .store import USAGE, VERSION, create_table


def is_url(database: str | Path) -> bool:
    return str(database).startswith(("postgresql://", "postgres://"))


def open_store(database: str | Path) -> LedgerStore:
    """Raises ConfigurationError, or MissingDependencyError without the client library."""
    if is_url(database):
        from ....accounting.ledger.postgres import PostgresStore

        return PostgresStore(str(database), USAGE, create_table(postgres=True), VERSION)
    return SqliteStore(Path(database), USAGE)


def open_reader(database: str | Path) -> UsageReader:
    """Raises MissingDependencyError without the client library."""
    if is_url(database):
        from ....accounting.ledger.postgres import connect_to_read

        return UsageReader(str(database), connect_to_read, day="FLOOR(started_at / 86400)::int")
    return UsageReader(str(database))
