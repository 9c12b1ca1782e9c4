"""Budgets of calendar periods: the periods' bounds, and the completion tokens that a budget grants.

A request reserves the maximum length of its answer. If it can reserve less, its answer is capped at the reservation. At
the end of the request, the true cost replaces the reservation. A stream keeps its reservation until its end, because
hidden tokens are only reported there.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import lru_cache
from typing import Literal

from .token_estimate import STEP_TOKENS

DAY_S = 86_400
Period = Literal["day", "month"]
#: One answer reserves at most 1/SHARE of the remaining budget if other requests hold reservations, or if the maximum
#: length of the answer does not fit.
SHARE = 4
#: Tokens reserved by one top-up of a stream that exceeds its reservation.
TOP_UP_TOKENS = 4096
_MARGIN_TOKENS = 256  # tolerated excess over a reservation, because estimates of short answers are inaccurate
_BYTES_PER_TOKEN = 4
_EPOCH = date(1970, 1, 1).toordinal()


def plain_number(value: float) -> str:
    """Return a number without an exponent, rounded to six significant digits below a million, else to an integer."""
    return f"{Decimal(f'{value:.6g}'):f}" if value < 1e6 else f"{value:.0f}"


def first_day(period: Period, day: int) -> int:
    """Return the first day of the period that contains `day`; both in days since 1970."""
    return day if period == "day" else day - (date.fromordinal(_EPOCH + day).day - 1)


@lru_cache(4)
def bounds(period: Period, day: int) -> tuple[float, float]:
    """Return the start and end of the period that contains `day`, in seconds since the epoch."""
    first = first_day(period, day)
    following = day + 1 if period == "day" else first_day(period, first + 31)
    return first * DAY_S, following * DAY_S


@dataclass(frozen=True, slots=True)
class TokenDemand:
    """The completion tokens that a request asks of a budget."""

    # Minimum grant. The request is refused if the budget has fewer tokens left.
    least: int
    # Largest useful grant, with which the answer needs no cap.
    most: int
    # Whether the request or the price table states the maximum. A stated maximum is granted if it fits.
    is_known: bool = False

    @property
    def likely(self) -> int:
        """Tokens to charge without a reservation if the answer is lost: the stated maximum, or else the minimum."""
        return self.most if self.is_known else self.least

    def granted(self, available: float, *, alone: bool) -> int | None:
        """Return the tokens to reserve out of `available`, or None if the request does not fit.

        `alone`: no other request holds a reservation, so nothing must be left for others.
        """
        if available < self.least:
            return None
        share = available / SHARE
        if self.most <= (available if alone or self.is_known else share):
            return self.most
        return min(self.most, max(self.least, int(share)))


TOP_UP = TokenDemand(least=STEP_TOKENS // 4, most=TOP_UP_TOKENS)


@dataclass(slots=True)
class StreamTokenEstimate:
    """The token count of a stream so far, estimated from its events until the usage arrives."""

    # Tokens reserved for the stream.
    reserved: int
    # Number of events with text since `counted`.
    texts: int = 0
    # Bytes of text in those events.
    bytes: int = 0
    # Tokens that servers have counted before those events.
    counted: int = 0

    @property
    def written(self) -> int:
        return self.counted + max(self.texts, self.bytes // _BYTES_PER_TOKEN)

    @property
    def bound(self) -> int:
        """Tokens to charge if the server reports no usage: one per byte up to `reserved`, but at least `written`."""
        return max(self.written, min(self.reserved, self.counted + self.bytes))

    @property
    def is_short(self) -> bool:
        """Return whether the answer exceeds its reservation in events, or twice its reservation in estimated tokens."""
        least = self.counted + self.texts
        return least > self.reserved + _MARGIN_TOKENS or self.written > 2 * self.reserved + _MARGIN_TOKENS
