"""Budgets of a router for a day or a month, kept in the ledger: no race and no restart passes a limit.

Before a request goes to the cloud, its maximum cost is reserved in the transaction that reads the rest of the budget.
The true cost replaces the reservation at the end. A process that dies in between leaves its reservation as spent: the
cloud may have charged it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Literal, TypeVar, get_args

from ...accounting.accounts import Claim, Kind, Standing, granted, renewal
from ...accounting.budget import DAY_S, Period, Wanted, bounds, first_day
from ...protocol.errors import BudgetExceededError, ConfigurationError
from ..request.caller import Caller
from .ledger import Ledger

Scope = Literal["all", "key", "user"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
T = TypeVar("T")
log = logging.getLogger("updraft.router")

_EXCESS: dict[Kind, str] = {
    "usd": "${used:.4f} of ${limit:g} are used or reserved, and this request may cost ${amount:.4f}",
    "cloud_tokens": "{used} of {limit} cloud tokens are used or reserved, and this may take {amount}",
}
_WOKEN = 8  # waiting requests that one settlement lets try again
_RETRY_S = 1.0  # other processes settle, too


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
class Demand:
    """The charge of one request as a function of the tokens of its answer."""

    # Taken whatever is written.
    fixed: Charge
    # US dollars of a written token.
    usd_per_token: float
    wanted: Wanted

    def charge(self, tokens: int) -> Charge:
        return self.fixed + Charge(cloud_tokens=tokens, usd=tokens * self.usd_per_token)


SpendingRow = tuple[Period, int, str]
"""The key of a row of `spending`: period, its first day, and the name of the scope."""


@dataclass(frozen=True, slots=True)
class Reservation:
    # When it was made, in days since 1970: what it takes is settled with the periods of that day.
    day: int
    charge: Charge
    # Tokens of the answer that the last demand was granted.
    tokens: int = 0
    # The rows of `spending` that hold the charge.
    rows: frozenset[SpendingRow] = frozenset()


class InFlight:
    """The requests of one process that hold a reservation, and those that wait until one is settled.

    It outlives a budget whose limits change.
    """

    def __init__(self) -> None:
        #: Requests that hold a reservation.
        self.count = 0
        #: How many reservations have been settled.
        self.settlements = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def settlement(self, until: float, seen: int) -> bool:
        """Wait for another request to settle, up to `until` on the monotonic clock. False: no request is in flight.

        `seen`: the value of `settlements` before the budget was asked. A later settlement ends the wait at once.
        """
        left = until - time.monotonic()
        if left <= 0:
            return False
        if self.settlements != seen or not self.count:
            return self.settlements != seen
        settled = asyncio.get_running_loop().create_future()
        self._waiting.append(settled)
        await asyncio.wait([settled], timeout=min(left, _RETRY_S))
        settled.cancel()
        return True

    def settled(self) -> None:
        """Count one request less, whose settlement is in the ledger, and let waiting requests try again."""
        self.count = max(0, self.count - 1)
        self.settlements += 1
        for _ in range(min(_WOKEN, len(self._waiting))):
            if not (waiting := self._waiting.popleft()).done():
                waiting.set_result(None)


class Budget:
    """The limits of one router, by scope: "all", "key" and "user".

    Without a ledger, because of `problem`, the rest is unknown, and nothing is spent.
    """

    def __init__(
        self,
        limits: Mapping[Scope, BudgetLimits],
        ledger: Ledger | None,
        problem: str = "",
        in_flight: InFlight | None = None,
    ) -> None:
        self._limits: dict[Scope, BudgetLimits] = {scope: each for scope, each in limits.items() if each}
        self._ledger = ledger
        #: Why the ledger could not be asked last; None: it could.
        self.problem: str | None = problem or None
        self.in_flight = InFlight() if in_flight is None else in_flight

    def counts_from(self) -> float:
        """Since when the running periods go, in seconds since the epoch: rows from then on may be counted again."""
        return min(first_day(limits.period, _today()) for limits in self._limits.values()) * DAY_S

    async def exceeded(self, caller: Caller, demand: Demand) -> BudgetExceededError | None:
        """Return the error if a budget has no room for the least of `demand`, else None. Reserves nothing."""
        try:
            await self._alone(lambda connection: self._checked(connection, _today(), caller, demand))
        except BudgetExceededError as error:
            return error
        return None

    async def reserve(self, caller: Caller, demand: Demand, held: Reservation | None = None) -> Reservation:
        """Take `demand` from all budgets of `caller`, or raise BudgetExceededError and take nothing.

        `held` is what the request has reserved before: the result is both, of the day of the first.
        """
        before = Reservation(_today(), NOTHING) if held is None else held

        def take(connection: sqlite3.Connection) -> Reservation:
            claims, standings = self._checked(connection, before.day, caller, demand)
            alone = self.in_flight.count == (held is not None)
            charge = demand.charge(tokens := granted(demand.wanted, claims, standings, alone=alone))
            rows = self._rows(caller, before.day)
            for row in rows:
                _add(connection, row, charge)
            return Reservation(before.day, before.charge + charge, tokens, before.rows | rows)

        # Without a flush no other request of this process gets in between `exceeded` and this.
        reservation = await self._alone(take, flushed=False)
        self.in_flight.count += held is None
        return reservation

    def settle(
        self, connection: sqlite3.Connection, caller: Caller, reserved: Reservation | None, actual: Charge
    ) -> None:
        """Put what a request really took in the place of what was reserved for it, maybe under other limits."""
        held = Reservation(_today(), NOTHING) if reserved is None else reserved
        for row in held.rows | self._rows(caller, held.day):
            _add(connection, row, actual - held.charge if row in held.rows else actual)

    async def _alone(self, work: Callable[[sqlite3.Connection], T], *, flushed: bool = True) -> T:
        """Run `work` in a transaction of the ledger. Raises BudgetExceededError if the ledger cannot be asked."""
        if self._ledger is None:
            problem = f"budget unknown, so nothing is spent: {self.problem}"
            raise BudgetExceededError(problem, code="ledger_unavailable")
        try:
            result = await self._ledger.alone(work, flushed=flushed)
        except sqlite3.Error as error:
            self.problem = str(error)
            raise _unreadable() from error
        self.problem = None
        return result

    def _checked(
        self, connection: sqlite3.Connection, day: int, caller: Caller, demand: Demand
    ) -> tuple[list[Claim], list[Standing]]:
        """Return the claims of the least of `demand`, and how their accounts stand. Raises BudgetExceededError."""
        claims, standings, least = list[Claim](), list[Standing](), demand.charge(demand.wanted.least)
        for scope, limits in self._limits.items():
            spent, reasons = self._spent(connection, day, scope, caller), list[str]()
            name, (begins, ends) = _name(scope, caller), bounds(limits.period, day)
            amounts: tuple[tuple[Kind, float | None, float, float, float], ...] = (
                ("usd", limits.usd, spent.usd, least.usd, demand.usd_per_token),
                ("cloud_tokens", limits.cloud_tokens, spent.cloud_tokens, least.cloud_tokens, 1.0),
            )
            for kind, limit, used, amount, per_token in amounts:
                if limit is not None:
                    claims.append(Claim(scope, name, kind, limit, amount, begins, ends, per_token))
                    standings.append(Standing(used, 0.0))
                    if not standings[-1].fits(claims[-1]):
                        reasons.append(_EXCESS[kind].format(used=used, limit=limit, amount=amount))
            reasons += _share_excess(limits.cloud_share, spent, least)
            if reasons:
                whose = {"all": "", "key": " of this key", "user": " of this user"}[scope]
                when = "today" if limits.period == "day" else "this month"
                renews, renews_s = renewal(ends, time.time())
                raise BudgetExceededError(f"budget spent: {reasons[0]}{whose} {when}; {renews}", renews_s=renews_s)
        return claims, standings

    def _rows(self, caller: Caller, day: int) -> frozenset[SpendingRow]:
        return frozenset(
            (limits.period, first_day(limits.period, day), _name(scope, caller))
            for scope, limits in self._limits.items()
        )

    def _spent(self, connection: sqlite3.Connection, day: int, scope: Scope, caller: Caller) -> Charge:
        """Of one scope. A scope that this period has not seen begins with what the ledger's rows say."""
        name, period = _name(scope, caller), self._limits[scope].period
        first = first_day(period, day)
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
                f" FROM requests WHERE started_at >= :from AND started_at < :to{whose}",
                {
                    "from": first * DAY_S,
                    "to": bounds(period, day)[1],
                    "key": caller.key,
                    "user": caller.user,
                },
            ).fetchone()
        )
        connection.execute("INSERT INTO spending VALUES (?, ?, ?, ?, ?, ?, ?)", (period, first, name, *astuple(spent)))
        before = first_day(period, first - 1)  # requests that began in the period before may still be settled
        connection.execute("DELETE FROM spending WHERE period = ? AND day < ?", (period, before))
        return spent


def _add(connection: sqlite3.Connection, row: SpendingRow, more: Charge) -> None:
    connection.execute(
        "UPDATE spending SET requests = requests + ?, cloud_requests = cloud_requests + ?,"
        " cloud_tokens = cloud_tokens + ?, usd = usd + ? WHERE period = ? AND day = ? AND scope = ?",
        (*astuple(more), *row),
    )


def _share_excess(share: float | None, spent: Charge, more: Charge) -> list[str]:
    if share is None:
        return []
    allowed = math.ceil(share * (spent.requests + more.requests) - 1e-9)
    is_within = spent.cloud_requests + more.cloud_requests <= allowed
    counts = f"{spent.cloud_requests} of {spent.requests} requests used the cloud"
    return [] if is_within else [f"{counts}; the limit is {100 * share:g} %"]


def _name(scope: Scope, caller: Caller) -> str:
    return {"all": "all", "key": f"key:{caller.key}", "user": f"user:{caller.key}:{caller.user}"}[scope]


def _today() -> int:
    return int(time.time() // DAY_S)


def _unreadable() -> BudgetExceededError:
    """Nobody knows what is left, so nothing is spent."""
    log.exception("the ledger cannot be asked for the budget")
    return BudgetExceededError(
        "budget unknown: the ledger cannot be read, the log says why; nothing is spent until then"
    )


def _check(holds: bool, name: str, wanted: str) -> None:
    if not holds:
        raise ConfigurationError(f"budget: {name} must be {wanted}.", param=f"budget.{name}")
