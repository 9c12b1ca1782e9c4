"""The ledger: one SQLite row per request, whatever became of it. Holds no prompt and no answer text."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ...accounting.ledger.files import open_database
from ...accounting.ledger.reading import LedgerReader
from ...accounting.ledger.table import LedgerTable, RequestRow, Table
from ...protocol.errors import ConfigurationError, StorageError

T = TypeVar("T")
log = logging.getLogger("updraft.router")

_ALONE_S = 5.0  # that a transaction of the event loop waits for other writers
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.002, 0.1  # between two tries


@dataclass(slots=True, kw_only=True)
class LedgerRow(RequestRow):
    """The outcome of one request."""

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
    # US dollars saved against asking the best cloud alone. NULL: a price is missing.
    saved_usd: float | None
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


@dataclass(frozen=True, slots=True)
class SpendingRow:
    """The sums of a budget over one period."""

    # The budget's period: `day` or `month`.
    period: str
    # The period's first day, in days since 1970, in UTC.
    day: int
    # All requests, those of a key, or those of a user.
    scope: str
    # How many there were.
    requests: int
    # How many of them asked the cloud.
    cloud_requests: int
    # Tokens that the cloud read and wrote.
    cloud_tokens: int
    # US dollars.
    usd: float


# The order of columns in intent files from before records had a format number.
_RECORD = (
    *("id", "started_at", "model", "route", "tier", "gate", "reason", "p_gain", "threshold", "local_tokens"),
    *("cloud_tokens", "draft_proposed", "draft_accepted", "cost_usd", "saved_usd", "latency_ms", "status", "key"),
    *("cloud_model", "failure", "decisions", "local_prompt_tokens", "cloud_prompt_tokens", "local_ms", "cloud_ms"),
    *("user", "feedback"),
)
_STAYED = "tier = 'local' AND route <> 'none' AND cloud_model = ''"

REQUESTS = LedgerTable(
    name="requests",
    row=LedgerRow,
    indexes=("requests_time ON requests (started_at)", "requests_caller ON requests (key, user, started_at)"),
    aliases={"ts": "started_at"},
    format=6,
    purpose="ledger",
    param="ledger",
    others=(Table(name="spending", row=SpendingRow, key="period, day, scope", upgrades={4: {"period": "'day'"}}),),
    upgrades={6: {"started_at": "ts"}},
    records={0: _RECORD},
    # The model is the last cloud that was asked, or the route where none was.
    groups={"model": "iif(cloud_model <> '', cloud_model, route)", "tier": "tier", "key": "key"},
    sums={
        "stayed_local": f"coalesce(sum({_STAYED}), 0)",
        "local_share": f"1.0 * sum({_STAYED}) / nullif(sum(route <> 'none'), 0)",
        "local_tokens": "coalesce(sum(local_prompt_tokens + local_tokens), 0)",
        "cloud_tokens": "coalesce(sum(cloud_prompt_tokens + cloud_tokens), 0)",
        "cost_usd": "iif(count(cost_usd) = count(*), total(cost_usd), NULL)",
        "unpriced": "count(*) - count(cost_usd)",
        "saved_usd": "sum(saved_usd)",
    },
    busy_s=0.5,
    places=256,
    place_bytes=4096,
    max_workers=256,
)
_INSERT = f"INSERT INTO requests ({', '.join(REQUESTS.columns)}) VALUES ({', '.join('?' * len(REQUESTS.columns))})"
GROUPS = ("day", *REQUESTS.groups)


class Ledger:
    """The router's ledger. Safe to use from any thread, and by several processes on one file (WAL).

    Opens the file as `open_database` does, and raises the same errors. A call that waits for longer than `busy_s` while
    another process writes raises sqlite3.OperationalError.
    """

    def __init__(self, path: Path, *, busy_s: float = 5.0, read_only: bool = False) -> None:
        self.path = path
        self._unreadable: str | None = None  # why the last `look` failed
        self._problem: str | None = None  # that `check` found last
        self._database = open_database(path, REQUESTS, busy_s=busy_s, read_only=read_only)
        self._reader = LedgerReader(REQUESTS, self._database.use)
        #: Waits for rows of this process that are on their way into the file.
        self.flush: Callable[[], object] = _nothing
        #: Alone with the file, also among processes: what is read in the block holds until it is written.
        self.transaction = self._database.transaction

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
            connection.execute(_INSERT, REQUESTS.values_of(row))

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
        with self._reader.rows(equal=[] if tier is None else [("tier", tier)], newest=limit) as rows:
            return [LedgerRow(**row) for row in rows]

    def get(self, request_id: str) -> LedgerRow | None:
        with self._reader.rows(equal=[("id", request_id)]) as rows:
            return next((LedgerRow(**row) for row in rows), None)

    async def feedback(self, request_id: str, *, up: bool) -> bool:
        """Keep a thumb; whether there is such a request. The last thumb counts. Waits as `alone` does."""
        query, thumb = "UPDATE requests SET feedback = ? WHERE id = ?", 1 if up else -1
        return await self.alone(lambda connection: connection.execute(query, (thumb, request_id)).rowcount > 0)

    def totals(self, by: str | None = None, *, since: float = 0.0) -> list[LedgerTotals]:
        """Over the rows from `since` (seconds since the epoch) on, per group `by` (of `GROUPS`); None: one for all."""
        sums = self._reader.totals([] if by is None else [by], since)
        return [LedgerTotals(group="" if by is None else each.pop(by), **each) for each in sums]

    def close(self) -> None:
        self._database.close()

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
