"""Ledger rows in PostgreSQL, for gateways on several machines.

Each worker's session holds an advisory lock while the worker is alive; the server releases it on disconnect.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...protocol.errors import ConfigurationError, MissingDependencyError
from ...protocol.safety.redaction import shown_url
from ...protocol.settings import state_folder
from .intents import WorkerIntents
from .store import LedgerStore, LedgerWriteError, RowRefusedError
from .table import BookedRow, LedgerTable, Values

if TYPE_CHECKING:
    from types import ModuleType

_SETTINGS: Mapping[str, Any] = {"connect_timeout": 5, "options": "-c statement_timeout=5000 -c lock_timeout=2000"}
_FORMAT = "CREATE TABLE IF NOT EXISTS usage_schema (version INTEGER NOT NULL)"
_LOCKS = 0x75706472  # first key of all Updraft advisory locks: "updr"


class PostgresStore(LedgerStore):
    """A ledger in PostgreSQL. The store connects at the first commit, and reconnects after failures. Until a commit
    succeeds, its rows are kept in files on this machine.
    """

    commits_intents = True
    skips_locked = " FOR UPDATE SKIP LOCKED"

    def __init__(self, url: str, table: LedgerTable) -> None:
        """Parse the URL without connecting. Raises ConfigurationError or MissingDependencyError."""
        self._intent, self._settle = table.insert("%s", settle=False), table.insert("%s", settle=True)
        self._psycopg = _client_library()
        self._url = url
        self._lock = secrets.randbits(31)
        self._connection: Any = None
        try:
            about = self._psycopg.conninfo.conninfo_to_dict(url)
        except self._psycopg.Error as error:  # the message may contain the password
            raise ConfigurationError(f"{shown_url(url)} is not the URL of a PostgreSQL database.") from error
        place = repr([about.get(name) for name in ("host", "hostaddr", "port", "dbname")]).encode()  # not the password
        folder = state_folder() / f"gateway-{blake2b(place, digest_size=8).hexdigest()}.workers"
        super().__init__(table, WorkerIntents(folder, table), f"{self._lock:08x}")

    def check(self) -> None:
        try:
            self._alive()
        except self._psycopg.Error as error:
            raise ConfigurationError(f"Cannot use {shown_url(self._url)} as the usage database: {error}.") from error

    def write(self, intents: Sequence[Values], settled: Sequence[BookedRow]) -> None:
        """Commit rows as documented in `LedgerStore`. Rows in PostgreSQL have no bookings."""
        try:
            with self._alive().transaction(), self._connection.cursor() as cursor:
                if intents:
                    cursor.executemany(self._intent, intents)
                if settled:
                    cursor.executemany(self._settle, [row.values for row in settled])
        except self._psycopg.errors.UndefinedTable as error:
            self._disconnect()
            raise LedgerWriteError(str(error)) from error
        except (self._psycopg.DataError, self._psycopg.ProgrammingError, UnicodeError) as error:
            raise RowRefusedError(str(error)) from error
        except self._psycopg.Error as error:
            raise LedgerWriteError(str(error)) from error

    def abandon(self) -> int:
        query = (
            f"UPDATE {self.table.name} SET state = 'abandoned' WHERE state = 'intent' AND worker NOT IN (SELECT"
            " lpad(to_hex(objid::bigint), 8, '0') FROM pg_locks WHERE locktype = 'advisory' AND classid = ?)"
            " RETURNING id"
        )
        return len(self._run(query, _LOCKS))

    def close(self) -> None:
        self._disconnect()
        super().close()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _alive(self) -> Any:
        if self._connection is None or self._connection.closed:
            with ExitStack() as otherwise:
                connection = self._psycopg.connect(self._url, autocommit=True, **_SETTINGS)
                otherwise.callback(connection.close)
                connection.execute("SELECT pg_advisory_lock(%s, %s)", (_LOCKS, self._lock))
                self._prepare(connection)
                otherwise.pop_all()
            self._connection = connection
        return self._connection

    def _prepare(self, connection: Any) -> None:
        """Create the tables if they do not exist."""
        if connection.execute("SELECT to_regclass('usage_schema')").fetchone()[0] is None:
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCKS,))  # concurrent CREATEs can fail
                for statement in (*self.table.create(postgres=True), _FORMAT):
                    connection.execute(statement.encode())
                if connection.execute("SELECT version FROM usage_schema").fetchone() is None:
                    connection.execute("INSERT INTO usage_schema VALUES (%s)", (self.table.format,))
        (version,) = connection.execute("SELECT version FROM usage_schema").fetchone()
        if version != self.table.format:
            database, needed = shown_url(self._url), self.table.format
            raise ConfigurationError(
                f"{database} has format {version}, but this version needs {needed}: name another database."
            )
        connection.execute(f"SELECT {', '.join(self.table.columns)} FROM {self.table.name} LIMIT 0".encode())

    def _run(self, query: str, *values: object) -> list[Any]:
        try:
            return self._alive().execute(query.replace("?", "%s").encode(), values).fetchall()
        except self._psycopg.Error as error:
            raise LedgerWriteError(str(error)) from error


@contextmanager
def open_to_read(url: str) -> Generator[Any]:
    """Yield a server-side cursor. Raises ConfigurationError, also for database errors in the block."""
    psycopg = _client_library()
    try:
        with psycopg.connect(url, **_SETTINGS) as connection, connection.cursor(name="usage") as cursor:
            yield cursor
    except psycopg.Error as error:
        raise ConfigurationError(f"The usage database {shown_url(url)} cannot be read: {error}.") from error


def _client_library() -> ModuleType:
    try:
        psycopg, _ = map(import_module, ("psycopg", "psycopg.conninfo"))
    except ImportError as error:
        raise MissingDependencyError(
            "A ledger in PostgreSQL needs psycopg 3: pip install 'psycopg[binary]'."
        ) from error
    return psycopg
