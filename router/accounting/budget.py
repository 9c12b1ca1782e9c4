"""Daily and monthly budgets of a router, in the ledger, so that no limit is exceeded, even after restarts.

A request's maximum cost is reserved before the cloud is called, in the same transaction that checks the budget. The
true cost replaces the reservation at the end. If a process dies in between, the reservation counts as spent.
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

from ...accounting.accounts import AccountUsage, Claim, Kind, granted, renewal
from ...accounting.budget import DAY_S, Period, TokenDemand, bounds, first_day, plain_number
from ...accounting.ledger.table import Values
from ...protocol.errors import BudgetExceededError, ConfigurationError
from ..request.chat_request import Caller
from .ledger import REQUESTS, Ledger

Scope = Literal["all", "key", "user"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
T = TypeVar("T")
log = logging.getLogger("updraft.router")

_EXCESS: dict[Kind, str] = {
    "usd": "${} of ${} are used or reserved, and this request may cost ${}",
    "cloud_tokens": "{} of {} cloud tokens are used or reserved, and this request may take {} tokens",
}
_WOKEN = 8  # maximum number of waiting requests to wake when the actual cost of another request is booked
_RETRY_S = 1.0  # maximum seconds between retries, since a booking by another process does not wake a waiting request


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """Budget limits for one period. None means no limit. The object is false if all limits are None."""

    # Limit in US dollars, by the configured prices.
    usd: float | None = None
    # Limit of prompt and completion tokens in the cloud.
    cloud_tokens: int | None = None
    # Largest share of requests that may use the cloud, at any time in the period. The number of requests is rounded up.
    cloud_share: float | None = None
    # `day` or `month`, by the UTC calendar.
    period: Period = "day"

    def __post_init__(self) -> None:
        _check(self.period in get_args(Period), "budget.period must be day or month")
        _check(self.usd is None or 0 <= self.usd < math.inf, "budget.usd must be 0 or more, and finite")
        _check(self.cloud_tokens is None or self.cloud_tokens >= 0, "budget.cloud_tokens must be 0 or more")
        _check(self.cloud_share is None or 0 <= self.cloud_share <= 1, "budget.cloud_share must be from 0 to 1")

    def __bool__(self) -> bool:
        return (self.usd, self.cloud_tokens, self.cloud_share) != (None, None, None)


@dataclass(frozen=True, slots=True)
class Charge:
    """The amounts that one or more requests take from a budget."""

    requests: int = 0
    cloud_requests: int = 0
    # Prompt and completion tokens in the cloud.
    cloud_tokens: int = 0
    usd: float = 0.0

    def __add__(self, other: Charge) -> Charge:
        return Charge(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Charge) -> Charge:
        return Charge(*map(operator.sub, astuple(self), astuple(other)))


NO_CHARGE = Charge()


@dataclass(frozen=True, slots=True)
class Demand:
    """The charge of one request as a function of its answer's length."""

    # Charge for the prompt, before any completion tokens.
    fixed: Charge
    # Price of a completion token, in US dollars.
    usd_per_token: float
    wanted: TokenDemand

    def charge(self, tokens: int) -> Charge:
        return self.fixed + Charge(cloud_tokens=tokens, usd=tokens * self.usd_per_token)


NO_DEMAND = Demand(NO_CHARGE, 0.0, TokenDemand(0, 0))

SpendingRow = tuple[Period, int, str]
"""Key of a row in the table `spending`: period, its first day, and the scope's name."""


@dataclass(frozen=True, slots=True)
class Reservation:
    # Day of the reservation, in days since 1970. The actual cost is booked in the same day or month.
    day: int
    charge: Charge
    # Completion tokens that the latest reservation allows.
    tokens: int = 0
    # Keys of the rows in the table `spending` that include the charge.
    rows: frozenset[SpendingRow] = frozenset()


class InFlight:
    """The requests of one process that hold a reservation, and the requests waiting for a reservation to settle. When
    the limits change, the new `Budget` keeps this object."""

    def __init__(self) -> None:
        #: Number of requests with a reservation.
        self.count = 0
        #: Number of reservations settled (replaced by the actual cost) so far.
        self.settlements = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def settlement(self, until: float, seen: int) -> bool:
        """Wait up to 1 second for another request to settle. Return whether to try the reservation again.

        `until`: deadline on the monotonic clock. `seen`: the value of `settlements` before the reservation was tried.
        Returns True at once if `settlements` has grown since, and False if no other request holds a reservation.
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
        """Count a settlement after it was written to the ledger, and wake waiting requests."""
        self.count = max(0, self.count - 1)
        self.settlements += 1
        for _ in range(min(_WOKEN, len(self._waiting))):
            if not (waiting := self._waiting.popleft()).done():
                waiting.set_result(None)


class Budget:
    """The budgets of one router, with limits by scope: all requests ("all"), an API key, or a user of a key. Without a
    ledger, every reservation is refused. `problem`: why the ledger is missing."""

    def __init__(
        self,
        limits: Mapping[Scope, BudgetLimits],
        ledger: Ledger | None,
        problem: str = "",
        in_flight: InFlight | None = None,
    ) -> None:
        self._limits: dict[Scope, BudgetLimits] = {scope: each for scope, each in limits.items() if each}
        self._ledger = ledger
        #: Error of the last ledger access, or None if it succeeded.
        self.problem: str | None = problem or None
        self.in_flight = InFlight() if in_flight is None else in_flight

    def counts_from(self, now: float) -> float:
        """Return the start of the earliest period at `now`, in epoch seconds. Budgets need all later ledger rows."""
        return min(first_day(limits.period, int(now // DAY_S)) for limits in self._limits.values()) * DAY_S

    async def exceeded(self, caller: Caller, demand: Demand) -> BudgetExceededError | None:
        """Return an error if a budget cannot cover the minimum charge of `demand`, else None. Reserves nothing."""
        try:
            await self._run_transaction(lambda connection: self._checked(connection, _today(), caller, demand))
        except BudgetExceededError as error:
            return error
        return None

    async def reserve(self, caller: Caller, demand: Demand, held: Reservation | None = None) -> Reservation:
        """Charge `demand` to all budgets of `caller`, or raise BudgetExceededError and charge nothing. `held`: the
        request's earlier reservation, if any. The returned reservation includes its charge and has the same day."""
        before = Reservation(_today(), NO_CHARGE) if held is None else held

        def take(connection: sqlite3.Connection) -> Reservation:
            claims, usages = self._checked(connection, before.day, caller, demand)
            alone = self.in_flight.count == (held is not None)
            charge = demand.charge(tokens := granted(demand.wanted, claims, usages, alone=alone))
            rows = self._rows(caller, before.day)
            connection.executemany(REQUESTS.booking, [(*astuple(charge), *row) for row in rows])
            return Reservation(before.day, before.charge + charge, tokens, before.rows | rows)

        # Do not flush pending rows first, because other requests could use up the budget meanwhile.
        reservation = await self._run_transaction(take, flushed=False)
        self.in_flight.count += held is None
        return reservation

    def bookings(self, caller: Caller, reserved: Reservation | None, actual: Charge) -> tuple[Values, ...]:
        """Return the parameters of `REQUESTS.booking` that replace the reservation of a request by the actual charge,
        even if the limits have changed since."""
        held = Reservation(_today(), NO_CHARGE) if reserved is None else reserved
        return tuple(
            (*astuple(actual - held.charge if row in held.rows else actual), *row)
            for row in held.rows | self._rows(caller, held.day)
        )

    async def _run_transaction(self, work: Callable[[sqlite3.Connection], T], *, flushed: bool = True) -> T:
        """Run `work` in a transaction of the ledger. Raises BudgetExceededError if the ledger is unavailable."""
        if self._ledger is None:
            problem = f"budget unknown, so nothing is spent: {self.problem}"
            raise BudgetExceededError(problem, code="ledger_unavailable")
        try:
            result = await self._ledger.alone(work, flushed=flushed)
        except sqlite3.Error as error:
            self.problem = str(error)
            log.exception("cannot read the budget from the ledger")
            raise BudgetExceededError(
                "budget unknown, so nothing is spent: the ledger cannot be read; see the log for the cause"
            ) from error
        self.problem = None
        return result

    def _checked(
        self, connection: sqlite3.Connection, day: int, caller: Caller, demand: Demand
    ) -> tuple[list[Claim], list[AccountUsage]]:
        """Return a claim on the minimum charge and the usage so far, for each limit. Raises BudgetExceededError."""
        claims, usages, least = list[Claim](), list[AccountUsage](), demand.charge(demand.wanted.least)
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
                    usages.append(AccountUsage(used, 0.0))
                    if not usages[-1].fits(claims[-1]):
                        fault = "too small" if used == 0 < limit else "spent"
                        reasons.append(f"{fault}: {_EXCESS[kind].format(*map(plain_number, (used, limit, amount)))}")
            reasons += _share_excess(limits.cloud_share, spent, least)
            if reasons:
                whose = {"all": "", "key": " of this key", "user": " of this user"}[scope]
                when = "today" if limits.period == "day" else "this month"
                renews, renews_s = renewal(ends, time.time())
                raise BudgetExceededError(f"budget {reasons[0]}{whose} {when}; {renews}", renews_s=renews_s)
        return claims, usages

    def _rows(self, caller: Caller, day: int) -> frozenset[SpendingRow]:
        return frozenset(
            (limits.period, first_day(limits.period, day), _name(scope, caller))
            for scope, limits in self._limits.items()
        )

    def _spent(self, connection: sqlite3.Connection, day: int, scope: Scope, caller: Caller) -> Charge:
        """Return the spending of a scope. If the table has no row for the scope, sum up the ledger's requests."""
        name, period = _name(scope, caller), self._limits[scope].period
        first = first_day(period, day)
        row = connection.execute(
            "SELECT requests, cloud_requests, cloud_tokens, usd FROM spending"
            " WHERE period = ? AND day = ? AND scope = ?",
            (period, first, name),
        ).fetchone()
        if row is not None:
            return Charge(*row)
        whose = {"all": "", "key": " AND key = :key", "user": " AND key = :key AND user = :user"}[scope]
        spent = Charge(
            *connection.execute(
                "SELECT count(*), coalesce(sum(cloud_tokens + cloud_prompt_tokens > 0), 0),"
                " coalesce(sum(cloud_tokens + cloud_prompt_tokens), 0), total(cost_usd)"
                f" FROM requests WHERE started_at >= :from AND started_at < :to{whose}",
                {"from": first * DAY_S, "to": bounds(period, day)[1], "key": caller.key, "user": caller.user},
            ).fetchone()
        )
        connection.execute("INSERT INTO spending VALUES (?, ?, ?, ?, ?, ?, ?)", (period, first, name, *astuple(spent)))
        # Keep the latest earlier period: its requests may still be settled, or the clock may have run ahead.
        before = "SELECT max(day) FROM spending WHERE period = ? AND day < ?"
        connection.execute(f"DELETE FROM spending WHERE period = ? AND day < ({before})", (period, period, first))
        return spent


def _share_excess(share: float | None, spent: Charge, more: Charge) -> list[str]:
    if share is None:
        return []
    allowed = math.ceil(share * (spent.requests + more.requests) - 1e-9)
    is_within = spent.cloud_requests + more.cloud_requests <= allowed
    counts = f"{spent.cloud_requests} of {spent.requests} requests used the cloud"
    return [] if is_within else [f"spent: {counts}; the limit is {100 * share:g} %"]


def _name(scope: Scope, caller: Caller) -> str:
    return {"all": "all", "key": f"key:{caller.key}", "user": f"user:{caller.key}:{caller.user}"}[scope]


def _today() -> int:
    return int(time.time() // DAY_S)


def _check(holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigurationError(f"{rule}.", param=rule.partition(" must ")[0])
