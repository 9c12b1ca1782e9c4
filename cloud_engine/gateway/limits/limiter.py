"""Limits of requests: the estimate is reserved before a request is sent to a node, and what it took is settled after.

A request is held against its key, its tenant and its model, all at once or not at all.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import msgspec

from ....accounting.budget import DAY_S, SHARE, TOP_UP, Period, Wanted, first_day, next_first_day
from ....accounting.ledger.reading import LedgerReader
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
from .accounts import PERIOD_S, Claim, Kind, Owner, Standing
from .policy import LimitPolicy
from .store import LimitStore

_LEDGER_S = 5.0
_NO_LIMITS = Limits()
_PERIODS: dict[Kind, Period] = {"usd_per_day": "day", "usd_per_month": "month"}
_TRIES = 4  # others reserve meanwhile
_COLUMNS: dict[Owner, Literal["key_id", "tenant", "model"]] = {"key": "key_id", "tenant": "tenant", "model": "model"}
_UNITS = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrent": "requests at once",
    "usd_per_day": "US dollars a day",
    "usd_per_month": "US dollars a month",
}


class LimitError(RateLimitError):
    """A limit is reached. `wait_s`: seconds until the request may fit. None: it never will."""

    def __init__(self, message: str, kind: Kind, wait_s: float | None, standing: Sequence[tuple[bytes, bytes]]) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.wait_s = wait_s
        self.standing = standing

    def headers(self) -> dict[str, str]:
        shown = {name.decode(): value.decode() for name, value in self.standing}
        if self.wait_s is None:
            return {**shown, "x-should-retry": "false"}
        return {**super().headers(), **shown, "retry-after": str(max(1, math.ceil(self.wait_s)))}


def limit_hit(error: UpdraftError) -> str | None:
    """The kind of limit that refused a request; None if none did."""
    if isinstance(error, LimitError):
        return error.kind
    return "budget" if isinstance(error, BudgetExceededError) else None


@dataclass(slots=True)
class LimitReservation:
    """The reservation of one request. It is settled in the end, also after a failure."""

    # Where.
    store: LimitStore
    # What.
    claims: Sequence[Claim] = ()
    # How the accounts stood before.
    standings: Sequence[Standing] = ()
    # The store's.
    receipt: str = ""
    # US dollars of a written token, where a budget applies.
    usd_per_token: float = 0.0
    # Tokens of the answer that are reserved of budgets.
    tokens: int = 0
    # More of the same, with the store's receipts.
    added: list[tuple[Sequence[Claim], str]] = field(default_factory=list[tuple[Sequence[Claim], str]])
    # Whether it is settled.
    is_settled: bool = False

    @property
    def budgets(self) -> list[Claim]:
        """The claims on budgets that a longer answer raises."""
        return [claim for claim in self.claims if claim.is_budget and self.usd_per_token > 0]

    @property
    def room(self) -> float:
        """The tokens that budgets had left for the answer."""
        pairs = zip(self.claims, self.standings, strict=False)
        rooms = [_room(claim, standing, self.usd_per_token) for claim, standing in pairs if claim in self.budgets]
        return min(rooms, default=math.inf) + self.tokens

    async def extend(self, wanted: Wanted) -> None:
        """Reserve an answer's maximum as far as budgets allow."""
        pairs = [pair for pair in zip(self.claims, self.standings, strict=True) if pair[0].is_budget]
        alone = not any(standing.reserved for _, standing in pairs)
        granted = wanted.granted(self.room, alone=alone) or self.tokens
        if granted > self.tokens:
            await self.top_up(granted - self.tokens)

    async def top_up(self, tokens: int) -> bool:
        """Reserve `tokens` more, or a share of what is left; False if too little is left."""
        for _ in range(_TRIES):
            claims = [msgspec.structs.replace(claim, amount=tokens * self.usd_per_token) for claim in self.budgets]
            admission = await self.store.admit(claims)
            if admission.refused is None and admission.unknown is None:
                self.added.append((claims, admission.receipt))
                self.tokens += tokens
                return True
            pairs = zip(self.budgets, admission.standings, strict=False)
            left = min((_left(*pair) / self.usd_per_token for pair in pairs), default=0.0)
            tokens = min(tokens - 1, int(left / SHARE))
            if tokens < TOP_UP.least:
                return False
        return False

    def headers(self) -> list[tuple[bytes, bytes]]:
        """`x-ratelimit-*`, as OpenAI spells them, of the tightest account of each kind."""
        return _standing_headers(self.claims, self.standings, taken=True)

    async def settle(self, prompt_tokens: int, completion_tokens: int, usd: float | None) -> None:
        """A second time changes nothing."""
        if self.is_settled or not self.claims:
            return
        self.is_settled = True
        amounts: dict[Kind, float] = {"tokens": prompt_tokens + completion_tokens}
        amounts["usd_per_day"] = amounts["usd_per_month"] = usd or 0.0
        await self.store.settle(self.claims, amounts, self.receipt)
        for claims, receipt in self.added:
            await self.store.settle(claims, {}, receipt)


@dataclass(frozen=True, slots=True)
class Limiter:
    """Admits requests."""

    # Where the accounts are.
    store: LimitStore
    # Limits that are not a key's own.
    policy: LimitPolicy
    # For budgets.
    prices: PriceTable
    # The ledger, from which budgets begin.
    ledger: LedgerReader
    # Budgets that are being begun.
    seeding: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def enter(self, principal: Principal) -> LimitReservation:
        """Count a request of the key and the tenant as in flight, before its body is read. Raises as `admit`."""
        claims = [
            Claim(owner, name, "concurrent", limits.concurrent, 1)
            for owner, name, limits in self._callers(principal)
            if limits.concurrent is not None
        ]
        return await self._taken(claims)

    async def admit(self, principal: Principal, model: str, prompt_tokens: int, answer: AnswerSize) -> LimitReservation:
        """Reserve the first step of the answer to a request that has entered. `prompt_tokens`: an estimate.

        Raises LimitError, BudgetExceededError, PermissionDeniedError or OverloadedError.
        """
        claims = list(self._claims(principal, model, prompt_tokens, answer))
        for claim in claims:
            if claim.amount > claim.limit and claim.kind == "tokens":
                raise LimitError(_too_large(claim), claim.kind, None, ())
        reservation = await self._taken(claims)
        if any(claim.is_budget for claim in claims):
            reservation.usd_per_token, reservation.tokens = self.price(model).output / 1e6, answer.least
        return reservation

    async def _taken(self, claims: Sequence[Claim]) -> LimitReservation:
        if not claims:
            return LimitReservation(self.store)
        admission = await self.store.admit(claims)
        while admission.unknown is not None:
            await self._seed(admission.unknown)
            admission = await self.store.admit(claims)
        if (refused := admission.refused) is not None:
            raise _refusal(refused, claims, admission.standings, admission.now)
        return LimitReservation(self.store, claims, admission.standings, admission.receipt)

    def _callers(self, principal: Principal) -> tuple[tuple[Owner, str, Limits], ...]:
        return (
            ("key", principal.key_id, principal.limits),
            ("tenant", principal.tenant, self.policy.tenants.get(principal.tenant, _NO_LIMITS)),
        )

    def _claims(self, principal: Principal, model: str, prompt_tokens: int, answer: AnswerSize) -> Iterator[Claim]:
        of_model: tuple[Owner, str, Limits] = ("model", model, self.policy.models.get(model, _NO_LIMITS))
        for owner, name, limits in (*self._callers(principal), of_model):
            if limits == _NO_LIMITS:
                continue
            if limits.requests_per_minute is not None:
                yield Claim(owner, name, "requests", limits.requests_per_minute, 1)
            if limits.tokens_per_minute is not None:
                amount = _reserved(limits.tokens_per_minute, prompt_tokens, answer)
                yield Claim(owner, name, "tokens", limits.tokens_per_minute, amount)
            if limits.concurrent is not None and owner == "model":  # the others have counted it as it entered
                yield Claim(owner, name, "concurrent", limits.concurrent, 1)
            budgets = {"usd_per_day": limits.usd_per_day, "usd_per_month": limits.usd_per_month}
            for kind, period in _PERIODS.items():
                if (usd := budgets[kind]) is not None:
                    price, day = self.price(model), int(time.time() // DAY_S)
                    begins, ends = first_day(period, day) * DAY_S, next_first_day(period, day) * DAY_S
                    cost = (prompt_tokens * price.dearest_input + answer.least * price.output) / 1e6
                    yield Claim(owner, name, kind, usd, cost, begins, ends)

    def price(self, model: str) -> Price:
        """Raises PermissionDeniedError where the model has none."""
        price = self.prices.at(model, time.time())
        if price is None:
            raise PermissionDeniedError(
                f"The model {model!r} has no price, and a budget applies to this request: the operator adds a price "
                "to the table of --prices.",
                param="model",
            )
        return price

    async def _seed(self, claim: Claim) -> None:
        """The ledger's sum of a budget since its period began."""
        async with self.seeding:
            try:
                async with asyncio.timeout(_LEDGER_S):
                    spent = await asyncio.to_thread(self.ledger.spent, _COLUMNS[claim.owner], claim.name, claim.begins)
            except TimeoutError as error:
                raise OverloadedError("The ledger does not say what is left of the budget: try again later.") from error
            await self.store.seed(claim, spent)


def _reserved(limit: int, prompt_tokens: int, answer: AnswerSize) -> int:
    """An estimate alone never makes a request too large: it waits at most until the account is empty."""
    written = min(answer.least, limit) if answer.limit is None else answer.most(None)
    return written + min(prompt_tokens, max(0, limit - written))


def _left(claim: Claim, standing: Standing) -> float:
    return claim.limit - standing.used - standing.reserved


def _room(claim: Claim, standing: Standing, usd_per_token: float) -> float:
    return (_left(claim, standing) - claim.amount) / usd_per_token


def _refusal(
    refused: Claim, claims: Sequence[Claim], standings: Sequence[Standing], now: float
) -> LimitError | BudgetExceededError:
    standing = standings[-1]
    wait_s = standing.wait_s(refused, now)
    used = standing.used + standing.reserved
    message = (
        f"The limit of this {refused.owner} is {refused.limit:g} {_UNITS[refused.kind]}: "
        f"{used:.6g} are used or reserved, "
    )
    if refused.is_budget and standing.used + refused.amount > refused.limit:
        renews = datetime.fromtimestamp(refused.ends, UTC)
        message += f"and this may cost {refused.amount:.6g}. It renews at {renews:%F %H:%M} UTC."
        return BudgetExceededError(message, renews_s=wait_s)
    message += f"and this takes {refused.amount:.6g}. Try again in {duration(wait_s)}."
    return LimitError(message, refused.kind, wait_s, _standing_headers(claims, standings, taken=False))


def _too_large(claim: Claim) -> str:
    return (
        f"This request asks for up to {claim.amount:g} tokens, and the limit is {claim.limit:g} tokens per minute: "
        "lower max_tokens."
    )


def _standing_headers(
    claims: Sequence[Claim], standings: Sequence[Standing], *, taken: bool
) -> list[tuple[bytes, bytes]]:
    """Of the accounts that were looked at. `taken`: with the claims on top of how they stood."""
    tightest: dict[Kind, tuple[float, float, float]] = {}
    for claim, standing in zip(claims, standings, strict=False):
        if claim.is_rate:
            held = standing.used + standing.reserved + (claim.amount if taken else 0)
            found = (max(0.0, claim.limit - held), claim.limit, held * PERIOD_S / claim.limit)
            tightest[claim.kind] = min(found, tightest.get(claim.kind, found))
    headers: list[tuple[bytes, bytes]] = []
    for kind, (remaining, limit, reset_s) in tightest.items():
        for name, value in (
            ("limit", f"{limit:.0f}"),
            ("remaining", f"{int(remaining)}"),
            ("reset", duration(reset_s)),
        ):
            headers.append((f"x-ratelimit-{name}-{kind}".encode(), value.encode()))
    return headers


def duration(seconds: float) -> str:
    """As OpenAI writes durations: `17ms`, `1s`, `6m0s`, `1h0m0s`; rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, left = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{left}s"
    return f"{minutes}m{left}s" if minutes else f"{left}s"
