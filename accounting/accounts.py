"""The arithmetic of limits. Every limit is an account: what is used, and what requests in flight have reserved.

A rate is a leaky bucket that holds one minute's limit and drains at the limit's pace, kept as the time at which it is
empty: the theoretical arrival time of the generic cell rate algorithm (ITU-T I.371). So T seconds never use up more
than the limit times 1 + T/60. A budget does not drain, it ends with its period. Requests in flight are only reserved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec

from .budget import Wanted

Owner = Literal["all", "key", "user", "tenant", "model"]
Kind = Literal["requests", "tokens", "concurrent", "usd_per_day", "usd_per_month", "usd", "cloud_tokens"]

PERIOD_S = 60.0
_ROUNDING = 1e-9


class Claim(msgspec.Struct, frozen=True):
    """One request's demand on one account."""

    # The kind of owner whose limit it is.
    owner: Owner
    # Which of them.
    name: str
    # What is limited.
    kind: Kind
    # The most that the account may hold.
    limit: float
    # The estimate of what the request will use.
    amount: float
    # When a budget's period begins, in seconds since the epoch. 0: it is none.
    begins: float = 0.0
    # When that ends.
    ends: float = 0.0
    # What each token of the answer adds that the store grants beyond the least.
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
        """A request that begins is a request, whatever becomes of it; all else is settled later."""
        return self.kind != "requests"

    def extended(self, tokens: int) -> Claim:
        """The claim with `tokens` more of the answer."""
        return msgspec.structs.replace(self, amount=self.amount + tokens * self.per_token)


class Standing(msgspec.Struct, frozen=True):
    """An account as a claim found it."""

    # What is used: of a rate, what has not drained yet.
    used: float
    # What requests in flight have reserved.
    reserved: float

    def fits(self, claim: Claim) -> bool:
        """Return whether the claim fits. A claim on nothing always fits, also into a spent budget."""
        return claim.amount <= 0 or self.used + self.reserved + claim.amount <= claim.limit * (1 + _ROUNDING)

    def wait_s(self, claim: Claim, now: float) -> float:
        """Until the claim fits, if requests in flight use all that they have reserved."""
        if claim.is_budget and self.used + claim.amount > claim.limit:
            return max(0.0, claim.ends - now)
        if not claim.is_rate:
            return 1.0
        excess = self.used + self.reserved + claim.amount - claim.limit
        return max(0.0, excess * PERIOD_S / claim.limit)


def account_name(owner: Owner, kind: Kind, begins: float, name: str) -> str:
    """Return the name in the store; each period of a budget has its own."""
    return f"{owner} {kind} {begins:.0f} {name}"


def granted(wanted: Wanted, claims: Sequence[Claim], standings: Sequence[Standing], *, alone: bool = True) -> int:
    """Return the tokens of an answer to reserve, for claims that fit with the least.

    `alone`: no other request holds a reservation that `standings` do not show.
    """
    room = math.inf
    for claim, standing in zip(claims, standings, strict=True):
        if claim.per_token > 0:
            left = claim.limit - standing.used - standing.reserved - claim.amount
            room, alone = min(room, left / claim.per_token), alone and not standing.reserved
    return wanted.granted(room + wanted.least, alone=alone) or wanted.least


def renewal(ends: float, now: float) -> tuple[str, float]:
    """Return the end of a budget's period as a text, and the seconds from `now` to it."""
    return f"it renews at {datetime.fromtimestamp(ends, UTC):%Y-%m-%d %H:%M} UTC", max(0.0, ends - now)


def used(claim: Claim, value: float, now: float) -> float:
    """The amount in use at `now`, from the stored `value` of an account. Both are times of the store's own clock."""
    if claim.ends > 0:
        return value
    return 0.0 if claim.kind == "concurrent" else max(0.0, value - now) * claim.limit / PERIOD_S


def settled(claim: Claim, value: float, amount: float, now: float) -> float:
    """The stored value after `amount` more was used."""
    if claim.ends > 0:
        return value + amount
    return 0.0 if claim.kind == "concurrent" else max(value, now) + amount * PERIOD_S / claim.limit


def expires(claim: Claim, value: float, ahead: float = 0.0) -> float:
    """When an account without reservations equals a new one. `ahead`: the store's clock less the wall clock."""
    return claim.ends + ahead if claim.is_budget else value
