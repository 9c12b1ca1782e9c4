"""The database that `--db` names: a SQLite file, or PostgreSQL by its URL."""

from __future__ import annotations

from pathlib import Path

from .reading import UsageReader
from .store import SqliteStore, UsageStore


def is_url(database: str | Path) -> bool:
    return str(database).startswith(("postgresql://", "postgres://"))


def open_store(database: str | Path) -> UsageStore:
    """Raises ConfigurationError, or MissingDependencyError without the client library."""
    if is_url(database):
        from .postgres import PostgresStore

        return PostgresStore(str(database))
    return SqliteStore(Path(database))


def open_reader(database: str | Path) -> UsageReader:
    """Raises MissingDependencyError without the client library."""
    if is_url(database):
        from .postgres import connect_to_read

        return UsageReader(str(database), connect_to_read, day="FLOOR(started_at / 86400)::int")
    return UsageReader(str(database))
