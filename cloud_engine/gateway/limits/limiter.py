"""Limits of requests: an estimate is reserved before a request is sent to a node, and settled with the actual usage.

A request is charged to its key, tenant and model, atomically.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from ....accounting.accounts import PERIOD_S, AccountUsage, Claim, Kind, Owner, renewal
from ....accounting.budget import DAY_S, TOP_UP, Period, TokenDemand, bounds, plain_number
from ....accounting.ledger.reader import LedgerReader
from ....accounting.prices import Price, PriceTable
from ....accounting.token_estimate import AnswerSize
from ....protocol.errors import (
    BudgetExceededError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
    UpdraftError,
)
from ..access.principal import Limits, Principal
from .limits_file import LimitsFile
from .store import LimitStore, Settlement

_LEDGER_S = 5.0
_NO_LIMITS = Limits()
_COLUMNS: dict[Owner, Literal["key_id", "tenant", "model"]] = {"key": "key_id", "tenant": "tenant", "model": "model"}
_PERIODS: tuple[tuple[Kind, Period], ...] = (("usd_per_day", "day"), ("usd_per_month", "month"))
_LimitedOwner = tuple[Owner, str, Limits]
_UNITS = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrent": "requests at once",
    "usd_per_day": "US dollars a day",
    "usd_per_month": "US dollars a month",
}


class LimitError(RateLimitError):
    """A request was refused by a limit. `wait_s`: seconds until a retry may succeed; None: never."""

    def __init__(self, message: str, kind: Kind, wait_s: float | None, usage: Sequence[tuple[bytes, bytes]]) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.wait_s = wait_s
        self.usage = usage

    def headers(self) -> dict[str, str]:
        shown = {name.decode(): value.decode() for name, value in self.usage}
        if self.wait_s is None:
            return {**shown, "x-should-retry": "false"}
        return {**super().headers(), **shown, "retry-after": str(max(1, math.ceil(self.wait_s)))}


def limit_hit(error: UpdraftError) -> str | None:
    """Return the kind of limit that refused a request, or None for other errors."""
    if isinstance(error, LimitError):
        return error.kind
    return "budget" if isinstance(error, BudgetExceededError) else None


@dataclass(slots=True)
class LimitReservation:
    """The reservations of one request. They must be settled at the end, even after a failure."""

    store: LimitStore
    # Claims of the latest admission. A claim is the demand on one account.
    claims: Sequence[Claim] = ()
    # State of the claimed accounts before the admission.
    usages: Sequence[AccountUsage] = ()
    # Completion tokens reserved from budgets; 0 if no budget depends on the answer's length.
    tokens: int = 0
    # Cost reserved from budgets, in US dollars. None: no budget applies.
    usd: float | None = None
    # Whether the reservation covers fewer tokens than the longest possible answer.
    is_capped: bool = False
    # Claims to settle, with the store's receipts.
    taken: list[tuple[Claim, str]] = field(default_factory=list[tuple[Claim, str]])
    # Claims added while an answer grew, with receipts. They settle with zero usage: `taken` is charged for all usage.
    added: list[tuple[Claim, str]] = field(default_factory=list[tuple[Claim, str]])

    async def top_up(self) -> bool:
        """Reserve more completion tokens from the budgets. Return False if too little is left."""
        replace, growing = msgspec.structs.replace, [claim for claim in self.claims if claim.per_token > 0]
        claims = [replace(claim, amount=TOP_UP.least * claim.per_token) for claim in growing]
        admission = await self.store.admit(claims, TOP_UP)
        if admission.refused is not None or admission.unknown is not None:
            return False
        self.added += [(claim, admission.receipt) for claim in admission.claims]
        self.tokens += admission.tokens
        return True

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return `x-ratelimit-*` headers in OpenAI's format, from the tightest account of each kind."""
        return _usage_headers(self.claims, self.usages, taken=True)

    async def settle(self, prompt_tokens: int, completion_tokens: int, usd: float | None) -> None:
        """Settle all claims with the actual usage. A second call does nothing."""
        if not self.taken:
            return
        cost, tokens = usd or 0.0, prompt_tokens + completion_tokens
        used: dict[Kind, float] = {"concurrent": 0, "tokens": tokens, "usd_per_day": cost, "usd_per_month": cost}
        settlements: list[Settlement] = [(claim, used[claim.kind], receipt) for claim, receipt in self.taken]
        settlements += [(claim, 0.0, receipt) for claim, receipt in self.added]
        self.taken, self.added = [], []
        await self.store.settle(settlements)


@dataclass(frozen=True, slots=True)
class Limiter:
    """Admits requests within the limits of their key, tenant and model."""

    store: LimitStore
    limits_file: LimitsFile
    prices: PriceTable
    # Ledger that supplies the initial state of budgets.
    ledger: LedgerReader
    # Lock around the initialisation of budgets.
    seeding: asyncio.Lock = field(default_factory=asyncio.Lock)

    def has_budget(self, principal: Principal, model: str) -> bool:
        """Return whether a budget applies to requests of this caller to this model."""
        return any(limits.has_budget for _, _, limits in self._owners(principal, model))

    async def enter(self, principal: Principal) -> LimitReservation:
        """Count a request as in flight for its key and tenant before its body is read. Raises the errors of `admit`."""
        claims = [
            Claim(owner, name, "concurrent", limits.max_concurrency, 1)
            for owner, name, limits in self._callers(principal)
            if limits.max_concurrency is not None
        ]
        return await self._take(LimitReservation(self.store), claims)

    async def admit(
        self,
        principal: Principal,
        model: str,
        prompt_tokens: int,
        answer: AnswerSize,
        entered: LimitReservation | None = None,
    ) -> LimitReservation:
        """Reserve tokens for the longest possible answer, or as many as budgets allow.

        `entered`: result of `enter`. `prompt_tokens`: upper bound. Raises LimitError, BudgetExceededError,
        PermissionDeniedError or OverloadedError.
        """
        reservation = LimitReservation(self.store) if entered is None else entered
        price = self._price(model) if self.has_budget(principal, model) else None
        claims = list(_claims(self._owners(principal, model), price, prompt_tokens, answer))
        for claim in claims:
            if claim.kind == "tokens" and claim.amount > claim.limit:
                message = (
                    f"This request asks for up to {plain_number(claim.amount)} tokens, and the limit is "
                    f"{plain_number(claim.limit)} tokens per minute: lower max_tokens."
                )
                raise LimitError(message, claim.kind, None, ())
        wanted = None if price is None else TokenDemand(answer.least, answer.most(price.max_output))
        return await self._take(reservation, claims, wanted)

    async def _take(
        self, reservation: LimitReservation, claims: Sequence[Claim], wanted: TokenDemand | None = None
    ) -> LimitReservation:
        if not claims:
            return reservation
        admission = await self.store.admit(claims, wanted)
        while admission.unknown is not None:
            await self._seed(admission.unknown)
            admission = await self.store.admit(claims, wanted)
        if (refused := admission.refused) is not None:
            raise _refusal(refused, claims, admission.usages, admission.now)
        reservation.claims, reservation.usages, reservation.tokens = claims, admission.usages, admission.tokens
        more = 0 if wanted is None else admission.tokens - wanted.least
        reservation.usd = max((claim.extended(more).amount for claim in claims if claim.is_budget), default=None)
        reservation.is_capped = wanted is not None and 0 < admission.tokens < wanted.most
        reservation.taken += [(claim, admission.receipt) for claim in admission.claims if claim.is_reserved]
        return reservation

    def _owners(self, principal: Principal, model: str) -> tuple[_LimitedOwner, ...]:
        return *self._callers(principal), ("model", model, self.limits_file.models.get(model, _NO_LIMITS))

    def _callers(self, principal: Principal) -> tuple[_LimitedOwner, _LimitedOwner]:
        return (
            ("key", principal.key_id, principal.limits),
            ("tenant", principal.tenant, self.limits_file.tenants.get(principal.tenant, _NO_LIMITS)),
        )

    def _price(self, model: str) -> Price:
        """Return the price of the model. Raises PermissionDeniedError if the model has none."""
        price = self.prices.at(model, time.time())
        if price is None:
            raise PermissionDeniedError(
                f"The model {model!r} has no price, but a budget applies to this request: the operator must add one "
                "to the table of --prices.",
                param="model",
            )
        return price

    async def _seed(self, claim: Claim) -> None:
        """Initialise the account of a budget with the cost that the ledger shows for the budget's current period."""
        async with self.seeding:
            try:
                async with asyncio.timeout(_LEDGER_S):
                    spent = await asyncio.to_thread(self.ledger.spent, _COLUMNS[claim.owner], claim.name, claim.begins)
            except TimeoutError as error:
                message = "The budget cannot be read from the ledger now: try again later."
                raise OverloadedError(message, code="ledger_unavailable") from error
            await self.store.seed(claim, spent)


def _claims(
    owners: Iterable[_LimitedOwner], price: Price | None, prompt_tokens: int, answer: AnswerSize
) -> Iterator[Claim]:
    """Yield the request's demand on each limit. `price`: the model's price if a budget applies, else None."""
    for owner, name, limits in owners:
        if limits == _NO_LIMITS:
            continue
        if limits.requests_per_minute is not None:
            yield Claim(owner, name, "requests", limits.requests_per_minute, 1)
        if limits.tokens_per_minute is not None:
            amount = _reserved(limits.tokens_per_minute, prompt_tokens, answer)
            yield Claim(owner, name, "tokens", limits.tokens_per_minute, amount)
        if limits.max_concurrency is not None and owner == "model":  # `enter` has counted the key and tenant
            yield Claim(owner, name, "concurrent", limits.max_concurrency, 1)
        if price is None:  # no budget applies to this request
            continue
        cost = (prompt_tokens * price.highest_input + answer.least * price.output) / 1e6
        for kind, period in _PERIODS:
            if (usd := limits.usd_per_day if period == "day" else limits.usd_per_month) is not None:
                begins, ends = bounds(period, int(time.time() // DAY_S))
                yield Claim(owner, name, kind, usd, cost, begins, ends, price.output / 1e6)


def _reserved(limit: int, prompt_tokens: int, answer: AnswerSize) -> int:
    """Return the tokens to reserve. The prompt's upper bound is cut, because it must not exceed the limit by itself."""
    written = min(answer.assumed, limit) if answer.limit is None else answer.assumed
    return written + min(prompt_tokens, max(0, limit - written))


def _refusal(
    refused: Claim, claims: Sequence[Claim], usages: Sequence[AccountUsage], now: float
) -> LimitError | BudgetExceededError:
    usage = usages[-1]
    wait_s = usage.wait_s(refused, now)
    used = usage.used + usage.reserved
    dollar = "$" if refused.is_budget else ""
    message = (
        f"This {refused.owner} is limited to {plain_number(refused.limit)} {_UNITS[refused.kind]}: "
        f"{dollar}{plain_number(used)} are used or reserved. "
    )
    if refused.is_budget and usage.used + refused.amount > refused.limit:
        renews, wait_s = renewal(refused.ends, now)
        message += f"This request may cost ${plain_number(refused.amount)}; {renews}."
        return BudgetExceededError(message, renews_s=wait_s)
    message += f"This request needs {plain_number(refused.amount)}. Try again in {duration(wait_s)}."
    return LimitError(message, refused.kind, wait_s, _usage_headers(claims, usages, taken=False))


def _usage_headers(
    claims: Sequence[Claim], usages: Sequence[AccountUsage], *, taken: bool
) -> list[tuple[bytes, bytes]]:
    """Return `x-ratelimit-*` headers for the claimed accounts. `taken`: whether to count the claims as used."""
    tightest: dict[Kind, tuple[float, float, float]] = {}
    for claim, usage in zip(claims, usages, strict=False):
        if claim.is_rate:
            held = usage.used + usage.reserved + (claim.amount if taken else 0)
            figures = (max(0.0, claim.limit - held), claim.limit, held * PERIOD_S / claim.limit)
            tightest[claim.kind] = min(figures, tightest.get(claim.kind, figures))
    headers: list[tuple[bytes, bytes]] = []
    for kind, (remaining, limit, reset_s) in tightest.items():
        values = b"%d" % round(limit), b"%d" % remaining, duration(reset_s).encode()
        for name, value in zip((b"limit", b"remaining", b"reset"), values, strict=True):
            headers.append((b"x-ratelimit-%b-%b" % (name, kind.encode()), value))
    return headers


def duration(seconds: float) -> str:
    """Return a duration in OpenAI's format (`17ms`, `1s`, `6m0s`, `1h0m0s`), rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, left = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{left}s"
    return f"{minutes}m{left}s" if minutes else f"{left}s"
