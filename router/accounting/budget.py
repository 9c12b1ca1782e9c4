"""Budgets: what a day or a month may cost, kept in the ledger so that neither a race nor a restart goes past a limit.

Before a request goes to the cloud, the most it is likely to cost is reserved, in one transaction with the look at what
is left. When it has ended, the reservation becomes what it really cost. A process that dies in between leaves its
reservation as spent: the cloud may have charged it.
"""

from __future__ import annotations

import logging
import math
import operator
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from datetime import UTC, date, datetime
from typing import Any, Literal, get_args

from ...protocol.decoding import integral
from ...protocol.errors import BudgetExceededError, ConfigurationError
from ..request.caller import Caller
from ..request.json_narrowing import rows, table, tables
from .ledger import Ledger

log = logging.getLogger("updraft.router")

DAY_S = 86_400
Period = Literal["day", "month"]
ANSWER_TOKENS = 1024  # what an answer without a limit of its own is reckoned with
_EPOCH = date(1970, 1, 1).toordinal()
MAX_TOKENS = 2**40  # of one request, whatever it asks for: the ledger's integers end somewhere
ATTACHED_TOKENS = 1500  # what an image, a sound or a file is reckoned with
# Where they are in a message's part: of which type it is, and the field of what it has under that name.
_ATTACHED = (("image_url", "url"), ("input_audio", "data"), ("file", "file_data"), ("file", "file_id"))


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """Limits of one period. None is no limit. True if there is one."""

    # US dollars, as `prices` counts them.
    usd: float | None = None
    # Tokens that the cloud reads and writes.
    cloud_tokens: int | None = None
    # Share of the requests that may ask the cloud, rounded up, at any moment of the period.
    cloud_share: float | None = None
    # `day`, or calendar `month`; both in UTC.
    period: Period = "day"

    def __post_init__(self) -> None:
        _check(self.period in get_args(Period), "period", "day or month")
        _check(self.usd is None or self.usd >= 0, "usd", "0 or more")
        _check(self.cloud_tokens is None or self.cloud_tokens >= 0, "cloud_tokens", "0 or more")
        _check(self.cloud_share is None or 0 <= self.cloud_share <= 1, "cloud_share", "from 0 to 1")

    def __bool__(self) -> bool:
        return (self.usd, self.cloud_tokens, self.cloud_share) != (None, None, None)


@dataclass(frozen=True, slots=True)
class Charge:
    """The amounts that one or many requests take of a budget."""

    # How many there were.
    requests: int = 0
    # How many of them asked the cloud.
    cloud_requests: int = 0
    # Tokens that the cloud read and wrote.
    cloud_tokens: int = 0
    # US dollars.
    usd: float = 0.0

    def __add__(self, other: Charge) -> Charge:
        return Charge(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Charge) -> Charge:
        return Charge(*map(operator.sub, astuple(self), astuple(other)))


NOTHING = Charge()


@dataclass(frozen=True, slots=True)
class Reservation:
    # When it was made, in days since 1970: what it takes is settled with the periods of that day.
    day: int
    charge: Charge


class Budget:
    """The limits of one router, by scope: "all", "key" and "user"."""

    def __init__(self, limits: Mapping[str, BudgetLimits], ledger: Ledger) -> None:
        self._limits = {scope: each for scope, each in limits.items() if each}
        self._ledger = ledger

    def counts_from(self) -> float:
        """Since when the running periods go, in seconds since the epoch: rows from then on may be counted again."""
        return min(_first_day(limits.period, _today()) for limits in self._limits.values()) * DAY_S

    async def exceeded(self, caller: Caller, charge: Charge) -> BudgetExceededError | None:
        """The reason why `charge` does not fit into what is left; None if it does. Reserves nothing."""
        day = _today()
        try:
            return await self._ledger.alone(lambda connection: self._exceeded(connection, day, caller, charge))
        except sqlite3.Error:
            return _unreadable()

    async def reserve(self, caller: Caller, more: Charge, held: Reservation | None = None) -> Reservation:
        """Take `more` from all budgets of `caller`, or raise BudgetExceededError and take nothing.

        `held` is what the request has reserved before: the result is both, of the day of the first.
        """
        before = Reservation(_today(), NOTHING) if held is None else held

        def take(connection: sqlite3.Connection) -> None:
            if (error := self._exceeded(connection, before.day, caller, more)) is not None:
                raise error
            self._add(connection, before.day, caller, more)

        try:
            await self._ledger.alone(take)
        except sqlite3.Error as error:
            raise _unreadable() from error
        return Reservation(before.day, before.charge + more)

    def settle(
        self, connection: sqlite3.Connection, caller: Caller, reserved: Reservation | None, actual: Charge
    ) -> None:
        """Put what a request really took in the place of what was reserved for it."""
        if reserved is None:
            self._add(connection, _today(), caller, actual)
        else:
            self._add(connection, reserved.day, caller, actual - reserved.charge)

    def _exceeded(
        self, connection: sqlite3.Connection, day: int, caller: Caller, charge: Charge
    ) -> BudgetExceededError | None:
        for scope, limits in self._limits.items():
            why = _excess(limits, self._spent(connection, day, scope, caller), charge)
            if why is not None:
                renews = _next_first_day(limits.period, day) * DAY_S
                until = datetime.fromtimestamp(renews, UTC).strftime("%Y-%m-%d %H:%M UTC")
                whose = {"all": "", "key": " of this key", "user": " of this user"}[scope]
                when = "today" if limits.period == "day" else "this month"
                message = f"budget spent: {why}{whose} {when}; it renews at {until}"
                return BudgetExceededError(message, renews_s=max(0.0, renews - time.time()))
        return None

    def _spent(self, connection: sqlite3.Connection, day: int, scope: str, caller: Caller) -> Charge:
        """Of one scope. A scope that this period has not seen begins with what the ledger's rows say."""
        name, period = _name(scope, caller), self._limits[scope].period
        first = _first_day(period, day)
        found = connection.execute(
            "SELECT requests, cloud_requests, cloud_tokens, usd FROM spending"
            " WHERE period = ? AND day = ? AND scope = ?",
            (period, first, name),
        ).fetchone()
        if found is not None:
            return Charge(*found)
        whose = {"all": "", "key": " AND key = :key", "user": " AND key = :key AND user = :user"}[scope]
        spent = Charge(
            *connection.execute(
                "SELECT count(*), coalesce(sum(cloud_tokens + cloud_prompt_tokens > 0), 0),"
                " coalesce(sum(cloud_tokens + cloud_prompt_tokens), 0), total(cost_usd)"
                f" FROM requests WHERE ts >= :from AND ts < :to{whose}",
                {
                    "from": first * DAY_S,
                    "to": _next_first_day(period, day) * DAY_S,
                    "key": caller.key,
                    "user": caller.user,
                },
            ).fetchone()
        )
        connection.execute("INSERT INTO spending VALUES (?, ?, ?, ?, ?, ?, ?)", (period, first, name, *astuple(spent)))
        before = _first_day(period, first - 1)  # requests that began in the period before may still be settled
        connection.execute("DELETE FROM spending WHERE period = ? AND day < ?", (period, before))
        return spent

    def _add(self, connection: sqlite3.Connection, day: int, caller: Caller, more: Charge) -> None:
        for scope, limits in self._limits.items():
            connection.execute(
                "UPDATE spending SET requests = requests + ?, cloud_requests = cloud_requests + ?,"
                " cloud_tokens = cloud_tokens + ?, usd = usd + ? WHERE period = ? AND day = ? AND scope = ?",
                (*astuple(more), limits.period, _first_day(limits.period, day), _name(scope, caller)),
            )


def expected_tokens(body: dict[str, Any]) -> tuple[int, int]:
    """The most that a request is likely to make the cloud read and write, in tokens.

    Read: a token has at least one byte of UTF-8, so the bytes are a bound; what is attached has a rate of its own.
    Written: the caller's limit on each answer, or 1,024; never more than any cloud writes.
    """
    limits = [integral(body.get(name)) for name in ("max_completion_tokens", "max_tokens")]
    limit = next(filter(_counts, limits), None)
    answers = max(filter(_counts, (integral(body.get(name)) for name in ("n", "best_of"))), default=1)
    read = _read_tokens(body) + sum(ATTACHED_TOKENS - _read_tokens(each) for each in _attached(body))
    return read, min(answers * (ANSWER_TOKENS if limit is None else limit), MAX_TOKENS)


def _read_tokens(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if (items := rows(value)) is not None:
        return len(items) + sum(map(_read_tokens, items))
    if (entries := table(value)) is not None:
        return 8 + sum(_read_tokens(name) + _read_tokens(item) for name, item in entries.items())
    return 0


def _attached(body: dict[str, Any]) -> Iterator[str]:
    """Images, sounds and files, where the wire has them: anywhere else what looks like one is read as text."""
    for message in tables(body.get("messages")) or ():
        for part in tables(message.get("content")) or ():
            for kind, field in _ATTACHED:
                found = (table(part.get(kind)) or {}).get(field) if part.get("type") == kind else None
                if isinstance(found, str):
                    yield found


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _excess(limits: BudgetLimits, spent: Charge, more: Charge) -> str | None:
    usd, tokens, share = limits.usd, limits.cloud_tokens, limits.cloud_share
    if usd is not None and spent.usd + more.usd > usd + 1e-12:
        return f"${spent.usd:.4f} of ${usd:g} are used or reserved, and this request may cost ${more.usd:.4f}"
    if tokens is not None and spent.cloud_tokens + more.cloud_tokens > tokens:
        return (
            f"{spent.cloud_tokens} of {tokens} cloud tokens are used or reserved, and this may take {more.cloud_tokens}"
        )
    if share is not None:
        allowed = math.ceil(share * (spent.requests + more.requests) - 1e-9)
        if spent.cloud_requests + more.cloud_requests > allowed:
            return f"{spent.cloud_requests} of {spent.requests} requests asked the cloud, a share of {share:g} may"
    return None


def _name(scope: str, caller: Caller) -> str:
    return {"all": "all", "key": f"key:{caller.key}", "user": f"user:{caller.key}:{caller.user}"}[scope]


def _today() -> int:
    return int(time.time() // DAY_S)


def _first_day(period: Period, day: int) -> int:
    """Of the period that `day` is in; both in days since 1970."""
    return day if period == "day" else day - (date.fromordinal(_EPOCH + day).day - 1)


def _next_first_day(period: Period, day: int) -> int:
    return day + 1 if period == "day" else _first_day(period, _first_day(period, day) + 31)


def _unreadable() -> BudgetExceededError:
    """Nobody knows what is left, so nothing is spent."""
    log.exception("the ledger cannot be asked for the budget")
    return BudgetExceededError(
        "budget unknown: the ledger cannot be read, the log says why; nothing is spent until then"
    )


def _check(holds: bool, name: str, wanted: str) -> None:
    if not holds:
        raise ConfigurationError(f"budget: {name} must be {wanted}.", param=f"budget.{name}")
