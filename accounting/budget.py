"""Budgets of calendar periods: where periods begin, and how many tokens of an answer a budget grants.

An answer is reserved at its maximum, or capped at what is reserved, and settled at its true cost. A stream is no
exception: it may hide any number of tokens until its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Literal

from .token_estimate import STEP_TOKENS

DAY_S = 86_400
Period = Literal["day", "month"]
#: The part of a budget's rest that one answer takes while others are in flight, or if its maximum does not fit.
SHARE = 4
#: Tokens of one top-up, for a stream that passes its reservation.
TOP_UP_TOKENS = 4096
_MARGIN_TOKENS = 256  # of short answers, whose estimates are the least exact
_BYTES_PER_TOKEN = 4
_EPOCH = date(1970, 1, 1).toordinal()


def first_day(period: Period, day: int) -> int:
    """Return the first day of the period around `day`; both in days since 1970."""
    return day if period == "day" else day - (date.fromordinal(_EPOCH + day).day - 1)


@lru_cache(4)
def bounds(period: Period, day: int) -> tuple[float, float]:
    """Return the begin and the end of the period around `day`, in seconds since the epoch."""
    first = first_day(period, day)
    following = day + 1 if period == "day" else first_day(period, first + 31)
    return first * DAY_S, following * DAY_S


@dataclass(frozen=True, slots=True)
class Wanted:
    """The tokens that an answer asks of a budget."""

    # Without these the request is refused.
    least: int
    # With these the answer needs no cap.
    most: int
    # The caller or the model's price names the maximum, so it is granted wherever it fits.
    is_known: bool = False

    def granted(self, room: float, *, alone: bool) -> int | None:
        """Return the tokens to reserve out of `room`, or None if the request does not fit.

        `alone`: no other request holds a reservation, so nothing has to be left for others.
        """
        if room < self.least:
            return None
        share = room / SHARE
        if self.most <= (room if alone or self.is_known else share):
            return self.most
        return min(self.most, max(self.least, int(share)))


TOP_UP = Wanted(least=STEP_TOKENS // 4, most=TOP_UP_TOKENS)


@dataclass(slots=True)
class GrowingAnswer:
    """A stream's tokens so far, estimated from its events until its usage comes."""

    # Reserved tokens.
    reserved: int
    # Events that held text.
    texts: int = 0
    # Bytes of text; those of texts beyond ASCII count twice.
    bytes: int = 0

    @property
    def written(self) -> int:
        return max(self.texts, self.bytes // _BYTES_PER_TOKEN)

    @property
    def bound(self) -> int:
        """Upper bound of the text's tokens, at most `reserved`: a token has at least one byte."""
        return min(self.reserved, max(self.texts, self.bytes))

    @property
    def is_short(self) -> bool:
        """Whether the server ignores the answer's limit. The margin is wide because `written` is an estimate."""
        return self.written > 2 * self.reserved + _MARGIN_TOKENS
