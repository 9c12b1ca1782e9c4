"""The ledger: one SQLite row per request, whatever became of it. Holds no prompt and no answer text."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TypeVar

from ...accounting.ledger.table import LedgerTable
from ...protocol.errors import ConfigurationError, StorageError
from ...protocol.safety.database import Database
from ...protocol.safety.shared_file import SharedFile
from ...protocol.wal import columns, transaction

T = TypeVar("T")
log = logging.getLogger("updraft.router")

_ALONE_S = 5.0  # that a transaction of the event loop waits for other writers
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.002, 0.1  # between two tries


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """The outcome of one request. Rows of older files have the defaults for columns that came later."""

    # The request's id, as in the answer.
    id: str
    # When it came, in seconds since the epoch.
    ts: float
    # The model that the caller named.
    model: str
    # `local`, `cloud`, `escalated`, `fallback`, `cache`, or `none` where no answer was given.
    route: str
    # Who answered: `local`, `cloud` or `none`.
    tier: str
    # The gate that decided.
    gate: int
    # Why, in words.
    reason: str
    # P(gain) of that gate.
    p_gain: float | None
    # Its threshold.
    threshold: float | None
    # Tokens that the device wrote.
    local_tokens: int
    # Tokens that the cloud wrote.
    cloud_tokens: int
    # Tokens of the local answer that the cloud got as a draft.
    draft_proposed: int
    # Tokens of it that the cloud accepted.
    draft_accepted: int
    # US dollars, as `prices` counts them. NULL: a model that was asked has no price.
    cost_usd: float | None
    # US dollars saved against asking the best cloud alone. NULL: a price is missing.
    saved_usd: float | None
    # Milliseconds until the answer was complete.
    latency_ms: float
    # HTTP status. 499: the caller went away.
    status: int
    # Digest of the caller's API key.
    key: str = ""
    # The last cloud model that was asked.
    cloud_model: str = ""
    # Why a cloud gave no answer.
    failure: str = ""
    # Every verdict in order, as JSON.
    decisions: str = "[]"
    # Tokens of the prompt on the device.
    local_prompt_tokens: int = 0
    # Tokens of the prompts that the cloud read.
    cloud_prompt_tokens: int = 0
    # Milliseconds spent on the device.
    local_ms: float = 0.0
    # Milliseconds spent in the cloud.
    cloud_ms: float = 0.0
    # Digest of the request's `user`.
    user: str = ""
    # What its reader thought of the answer: 1 good, -1 bad, 0 nothing said.
    feedback: int = 0


@dataclass(frozen=True, slots=True)
class LedgerTotals:
    """The totals of one group of requests."""

    # The day (UTC), model, tier or key that they share; empty: all of them.
    group: str
    # How many there were.
    requests: int
    # How many failed or were cancelled.
    errors: int
    # How many were answered on the device without asking a cloud.
    stayed_local: int
    # `stayed_local` of those that were answered, from 0 to 1. None: none was.
    local_share: float | None
    # Tokens that the device read and wrote.
    local_tokens: int
    # Tokens that the clouds read and wrote.
    cloud_tokens: int
    # US dollars. None: one of them asked a model without a price.
    cost_usd: float | None
    # How many asked a model without a price.
    unpriced: int
    # US dollars saved against the best cloud alone, over those where that is known. None: nowhere.
    saved_usd: float | None


# The columns that `Ledger.totals` groups by. The model is the last cloud that was asked, or the route where none was.
GROUPS = {
    "day": "date(ts, 'unixepoch')",
    "model": "iif(cloud_model <> '', cloud_model, route)",
    "tier": "tier",
    "key": "key",
}
_STAYED = "tier = 'local' AND route <> 'none' AND cloud_model = ''"
_TOTALS = (
    f"count(*), coalesce(sum(status >= 400), 0), coalesce(sum({_STAYED}), 0),"
    f" 1.0 * sum({_STAYED}) / nullif(sum(route <> 'none'), 0),"
    " coalesce(sum(local_prompt_tokens + local_tokens), 0), coalesce(sum(cloud_prompt_tokens + cloud_tokens), 0),"
    " iif(count(cost_usd) = count(*), total(cost_usd), NULL), count(*) - count(cost_usd), sum(saved_usd)"
)

# One entry per format: what turns a file of the format before it into this one. Append; never change what was released.
_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE requests (
          id TEXT PRIMARY KEY, ts REAL NOT NULL, model TEXT NOT NULL, route TEXT NOT NULL, tier TEXT NOT NULL,
          gate INTEGER NOT NULL, reason TEXT NOT NULL, p_gain REAL, threshold REAL,
          local_tokens INTEGER NOT NULL, cloud_tokens INTEGER NOT NULL,
          draft_proposed INTEGER NOT NULL, draft_accepted INTEGER NOT NULL,
          cost_usd REAL NOT NULL, saved_usd REAL NOT NULL, latency_ms REAL NOT NULL, status INTEGER NOT NULL
        ) STRICT""",
        "CREATE INDEX requests_ts ON requests (ts)",
    ),
    (
        "ALTER TABLE requests ADD COLUMN key TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE requests ADD COLUMN cloud_model TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE requests ADD COLUMN failure TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE requests ADD COLUMN decisions TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE requests ADD COLUMN local_prompt_tokens INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE requests ADD COLUMN cloud_prompt_tokens INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE requests ADD COLUMN local_ms REAL NOT NULL DEFAULT 0",
        "ALTER TABLE requests ADD COLUMN cloud_ms REAL NOT NULL DEFAULT 0",
    ),
    (
        "ALTER TABLE requests ADD COLUMN user TEXT NOT NULL DEFAULT ''",
        "CREATE INDEX requests_caller ON requests (key, user, ts)",
        """CREATE TABLE spending (
          day INTEGER NOT NULL, scope TEXT NOT NULL, requests INTEGER NOT NULL, cloud_requests INTEGER NOT NULL,
          cloud_tokens INTEGER NOT NULL, usd REAL NOT NULL, PRIMARY KEY (day, scope)
        ) STRICT, WITHOUT ROWID""",
    ),
    (  # money may be unknown, and budgets have periods
        *(
            statement
            for name in ("cost_usd", "saved_usd")
            for statement in (
                f"ALTER TABLE requests RENAME COLUMN {name} TO known_{name}",
                f"ALTER TABLE requests ADD COLUMN {name} REAL",
                f"UPDATE requests SET {name} = known_{name}",
                f"ALTER TABLE requests DROP COLUMN known_{name}",
            )
        ),
        "ALTER TABLE spending RENAME TO spending_of_days",
        """CREATE TABLE spending (
          period TEXT NOT NULL, day INTEGER NOT NULL, scope TEXT NOT NULL, requests INTEGER NOT NULL,
          cloud_requests INTEGER NOT NULL, cloud_tokens INTEGER NOT NULL, usd REAL NOT NULL,
          PRIMARY KEY (period, day, scope)
        ) STRICT, WITHOUT ROWID""",
        "INSERT INTO spending SELECT 'day', * FROM spending_of_days",
        "DROP TABLE spending_of_days",
    ),
    ("ALTER TABLE requests ADD COLUMN feedback INTEGER NOT NULL DEFAULT 0",),
)
_VERSION = len(_MIGRATIONS)
_COLUMNS = tuple(item.name for item in fields(LedgerRow))


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the file to this version's format in one transaction, so that several processes may open it at once."""
    if _format(connection, path) == _VERSION:
        return
    with transaction(connection):
        for statement in (line for step in _MIGRATIONS[_format(connection, path) :] for line in step):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version={_VERSION}")


def _check(connection: sqlite3.Connection, path: Path) -> None:
    if _format(connection, path) == 0:  # whoever made it has not come further, or it was cut
        raise StorageError(f"The ledger {path} is empty: the next start of the router fills it.", param="ledger")


def _format(connection: sqlite3.Connection, path: Path) -> int:
    """Of the file, 0 if it is empty. Raises ConfigurationError if it is newer, or holds something else."""
    query = (  # one statement, so that nobody writes in between; others may have a table of requests, too
        "SELECT user_version, (SELECT count(*) FROM sqlite_schema),"
        " (SELECT count(*) FROM sqlite_schema WHERE name = 'requests_ts') FROM pragma_user_version"
    )
    version, objects, ours = connection.execute(query).fetchone()
    if not 0 <= version <= _VERSION:
        raise ConfigurationError(
            f"The ledger {path} has format {version}, this version reads up to {_VERSION}: name another file.",
            param="ledger",
        )
    if objects if version == 0 else not ours:
        raise _no_ledger(path)
    return version


def _no_ledger(path: Path) -> ConfigurationError:
    return ConfigurationError(f"{path} is no ledger of Updraft: name another file.", param="ledger")


REQUESTS = LedgerTable(
    name="requests",
    columns=_COLUMNS,
    time="ts",
    prepare=_migrate,
    purpose="as the ledger",
    param="ledger",
    busy_s=0.5,
    places=256,
    place_bytes=4096,
    max_workers=256,
)
_INSERT = f"INSERT INTO requests ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"


class Ledger:
    """Safe to use from any thread, and by several processes on one file (WAL).

    A file of an older format is brought up to date; what is in it stays. Raises ConfigurationError if the file cannot
    be opened, is no ledger, or is one of a newer version.

    `busy_s`: for how long a call waits while another process writes, before it raises sqlite3.OperationalError. Opening
    waits up to 5 seconds in any case. `read_only`: change nothing, make no file, and leave an older format as it is.
    """

    def __init__(self, path: Path, *, busy_s: float = 5.0, read_only: bool = False) -> None:
        self.path = path
        prepare = _check if read_only else _migrate
        self._unreadable: str | None = None  # why the last `look` failed
        self._problem: str | None = None  # that `check` found last
        self._database = Database(
            SharedFile(path, REQUESTS.purpose, REQUESTS.param),
            lambda connection: prepare(connection, path),
            busy_s=busy_s,
            read_only=read_only,
        )
        #: Waits for rows of this process that are on their way into the file.
        self.flush: Callable[[], object] = _nothing
        #: Alone with the file, also among processes: what is read in the block holds until it is written.
        self.transaction = self._database.transaction
        with self._database.use() as connection:
            self._columns = columns(connection, "requests")

    def check(self) -> str | None:
        """Return why the file cannot be read, or is no longer at its path. The log says so once."""
        problem = self._unreadable
        if (lost := self._database.displaced()) is not None:
            problem = (
                f"{lost} was moved, replaced, deleted or emptied while it was open, so new rows may be lost."
                " Stop Updraft, put the file back to keep its rows, and start Updraft again."
            )
        if problem is not None and self._problem is None:
            log.error("The ledger cannot be used: %s", problem)
        self._problem = problem
        return problem

    def look(self, look: Callable[[Ledger], T]) -> T:
        """The result of `look` over a connection of its own. Raises ConfigurationError if the file cannot be read."""
        try:
            with closing(Ledger(self.path, read_only=True)) as ledger:
                result = look(ledger)
        except (sqlite3.Error, ConfigurationError) as error:
            unusable = error if isinstance(error, ConfigurationError) else damaged(self.path, str(error))
            if not _is_busy(error):
                self._unreadable = unusable.message
            raise unusable from error
        self._unreadable = None
        return result

    def record(self, row: LedgerRow) -> None:
        """Commit one row. A second row for one id raises sqlite3.IntegrityError."""
        with self._database.use() as connection:
            connection.execute(_INSERT, astuple(row))

    def verify(self) -> None:
        """Read the whole file. Raises StorageError if it is damaged."""
        try:
            with self._database.use() as connection:
                (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            found = str(error)
        if found != "ok":
            raise damaged(self.path, found)

    def rows(self, *, limit: int = 100, tier: str | None = None) -> list[LedgerRow]:
        """The newest rows first, of one tier only where one is given."""
        which = "" if tier is None else "WHERE tier = ? "
        return self._select(f"{which}ORDER BY ts DESC, rowid DESC LIMIT ?", *([] if tier is None else [tier]), limit)

    def get(self, request_id: str) -> LedgerRow | None:
        return next(iter(self._select("WHERE id = ?", request_id)), None)

    async def feedback(self, request_id: str, *, up: bool) -> bool:
        """Keep a thumb; whether there is such a request. The last thumb counts. Waits as `alone` does."""
        query, thumb = "UPDATE requests SET feedback = ? WHERE id = ?", 1 if up else -1
        return await self.alone(lambda connection: connection.execute(query, (thumb, request_id)).rowcount > 0)

    def totals(self, by: str | None = None, *, since: float = 0.0) -> list[LedgerTotals]:
        """Over the rows from `since` (seconds since the epoch) on, per group `by` (of `GROUPS`); None: one for all."""
        if len(self._columns) < len(_COLUMNS):
            raise ConfigurationError(f"The ledger {self.path} has an older format: start the router once on it.")
        group, grouped = ("''", "") if by is None else (GROUPS[by], " GROUP BY 1 ORDER BY 1")
        query = f"SELECT {group}, {_TOTALS} FROM requests WHERE ts >= ?{grouped}"
        with self._database.use() as connection:
            return [LedgerTotals(*found) for found in connection.execute(query, (since,))]

    def close(self) -> None:
        self._database.close()

    def _select(self, which: str, *values: str | int) -> list[LedgerRow]:
        with self._database.use() as connection:
            found = connection.execute(f"SELECT {', '.join(self._columns)} FROM requests {which}", values)
            return [LedgerRow(**dict(zip(self._columns, row, strict=True))) for row in found]

    async def alone(self, work: Callable[[sqlite3.Connection], T], *, flushed: bool = True) -> T:
        """The result of `work` in a transaction. Waits for other writers up to 5 seconds, off the event loop.

        `flushed`: wait also for the rows of this process that are on their way. Otherwise a free file is used at once.
        """
        if flushed:
            await asyncio.to_thread(self.flush)
        until, pause_s = time.monotonic() + _ALONE_S, _FIRST_PAUSE_S
        while True:
            try:
                with self.transaction() as connection:
                    return work(connection)
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() > until:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)


def _nothing() -> None:
    """Every row is in the file already."""


def _is_busy(error: BaseException) -> bool:
    """Whether another process holds the file."""
    code = getattr(error, "sqlite_errorcode", None) or getattr(error.__cause__, "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_BUSY


def damaged(path: Path, cause: str) -> StorageError:
    return StorageError(
        f"The ledger {path} is damaged or cannot be read ({cause}): stop Updraft and move the file away, with those"
        " that begin like it. The next start makes a new one.",
        param="ledger",
    )
