"""Arithmetic of rate limits and budgets: the amounts used, and the amounts reserved by requests in flight.

Each limit has an account. A rate is a leaky bucket that holds one minute's limit and drains at the limit's rate. The
bucket is stored as the time when it will be empty, the theoretical arrival time of the generic cell rate algorithm
(ITU-T I.371). At most limit * (1 + T / 60) is used in T seconds. A budget does not drain but ends with its period.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from .budget import TokenDemand

Owner = Literal["all", "key", "user", "tenant", "model"]
Kind = Literal["requests", "tokens", "concurrent", "usd_per_day", "usd_per_month", "usd", "cloud_tokens"]

PERIOD_S = 60.0
_ROUNDING = 1e-9


class Claim(msgspec.Struct, frozen=True):
    """Amount that one request needs from the account of one limit."""

    # Kind of the limit's owner.
    owner: Owner
    name: str
    # Quantity that the limit counts.
    kind: Kind
    # Maximum of the account.
    limit: float
    # Estimated use by the request.
    amount: float
    # Start of the budget's period, in seconds since the epoch. 0: not a budget.
    begins: float = 0.0
    # End of the budget's period, in seconds since the epoch. 0: not a budget.
    ends: float = 0.0
    # Amount added for each completion token that is granted beyond the minimum.
    per_token: float = 0.0

    @property
    def account(self) -> str:
        return account_name(self.owner, self.kind, self.begins, self.name)

    @property
    def is_rate(self) -> bool:
        return self.kind in ("requests", "tokens")

    @property
    def is_budget(self) -> bool:
        return self.ends > 0

    @property
    def is_reserved(self) -> bool:
        """Return whether the amount is reserved first and settled later. Requests are counted at once instead."""
        return self.kind != "requests"

    def extended(self, tokens: int) -> Claim:
        """Return the claim with `tokens` more completion tokens."""
        return msgspec.structs.replace(self, amount=self.amount + tokens * self.per_token)


class AccountUsage(msgspec.Struct, frozen=True):
    """The state of an account before a claim."""

    # Amount used. For a rate: the part that has not yet drained.
    used: float
    # Amount reserved by requests in flight.
    reserved: float

    def fits(self, claim: Claim) -> bool:
        """Return whether the claim fits. A claim of 0 always fits, even into a spent budget."""
        return claim.amount <= 0 or self.used + self.reserved + claim.amount <= claim.limit * (1 + _ROUNDING)

    def wait_s(self, claim: Claim, now: float) -> float:
        """Return the seconds until the claim fits, assuming that requests in flight use their reservations in full."""
        if claim.is_budget and self.used + claim.amount > claim.limit:
            return max(0.0, claim.ends - now)
        if not claim.is_rate:
            return 1.0
        excess = self.used + self.reserved + claim.amount - claim.limit
        return max(0.0, excess * PERIOD_S / claim.limit)


def account_name(owner: Owner, kind: Kind, begins: float, name: str) -> str:
    """Return the account's name in the store. Each period of a budget has a separate account."""
    return f"{owner} {kind} {begins:.0f} {name}"


def granted(wanted: TokenDemand, claims: Sequence[Claim], usages: Sequence[AccountUsage], *, alone: bool = True) -> int:
    """Return the completion tokens to reserve for a request. Its claims, for `wanted.least` tokens, must fit.

    `alone`: False if other requests hold reservations that are missing in `usages`.
    """
    available = math.inf
    for claim, usage in zip(claims, usages, strict=True):
        if claim.per_token > 0:
            left = claim.limit - usage.used - usage.reserved - claim.amount
            available, alone = min(available, left / claim.per_token), alone and not usage.reserved
    return wanted.granted(available + wanted.least, alone=alone) or wanted.least


def renewal(ends: float, now: float) -> tuple[str, float]:
    """Return the end of a budget's period as a clause for messages, and the seconds from `now` until then."""
    return f"the budget renews at {datetime.fromtimestamp(ends, UTC):%Y-%m-%d %H:%M} UTC", max(0.0, ends - now)


def used(claim: Claim, value: float, now: float) -> float:
    """Return the amount in use at `now`, from an account's stored `value`. Times are read from the store's clock."""
    if claim.ends > 0:
        return value
    return 0.0 if claim.kind == "concurrent" else max(0.0, value - now) * claim.limit / PERIOD_S


def settled(claim: Claim, value: float, amount: float, now: float) -> float:
    """Return the value to store for an account that held `value`, after `amount` more was used."""
    if claim.ends > 0:
        return value + amount
    return 0.0 if claim.kind == "concurrent" else max(value, now) + amount * PERIOD_S / claim.limit


def expires(claim: Claim, value: float, ahead: float = 0.0) -> float:
    """Return the time from which the store may delete an account without reservations.

    `ahead`: seconds by which the store's clock is ahead of the wall clock.
    """
    return claim.ends + ahead if claim.is_budget else value
