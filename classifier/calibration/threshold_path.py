"""Thresholds on P(gain), and the one walk from the safest of them to the boldest that can be shown to hold.

A path of thresholds is laid by P(gain) alone, never by the scores that test it, and what stayed local at one step stays
at the next. The walk stops at the first step that cannot be shown to hold, so no correction for multiple tests is due
(Angelopoulos et al., "Learn then Test", 2021). What is to hold is for those to say who walk.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappush, heappushpop
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..arrays import Bools, Floats

ALWAYS, NEVER = -1.0, 1.0
# Gates 1 and 2 save local time but may be wrong: each may send up this share of all rows against gate 3's judgement.
_EARLY_WASTE = 0.01


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Escalate where P(gain) is above the value; -1 escalates always."""

    # Of gate 1, before generation.
    before: float
    # Of gate 2, during it.
    during: float
    # Of gate 3, after it.
    after: float


class Judged(Protocol):
    """P(gain) of rows by each gate that there is, (n,) float64 each, in [0, 1]."""

    @property
    def before(self) -> Floats: ...
    @property
    def during(self) -> Floats | None: ...
    @property
    def after(self) -> Floats | None: ...


def escalated(rows: Judged, thresholds: Thresholds) -> Bools:
    """(n,) which rows go to the cloud."""
    up = rows.before > thresholds.before
    if rows.during is not None:
        up = up | (rows.during > thresholds.during)
    return up if rows.after is None else up | (rows.after > thresholds.after)


@dataclass(frozen=True, slots=True)
class Path:
    """m steps from where everything escalates to where nothing does."""

    # (m,) rising thresholds of gates 1, 2 and 3.
    before: Floats
    during: Floats
    after: Floats
    # (n,) the step from which on each row stays local.
    stays: NDArray[np.intp]

    @classmethod
    def of(cls, rows: Judged) -> Path:
        """A step for each P(gain) of the last gate; there the gates before it send up as much as they may."""
        judged = rows.before if rows.after is None else rows.after
        after = np.concatenate(([ALWAYS], np.unique(judged), [NEVER]))
        before, during = after, np.full(len(after), NEVER)
        stays = np.searchsorted(after, judged)
        if rows.after is not None:
            before = _early(rows.before, judged, after)
            stays = np.maximum(stays, np.searchsorted(before, rows.before))
            if rows.during is not None:
                during = _early(rows.during, judged, after)
                stays = np.maximum(stays, np.searchsorted(during, rows.during))
        return cls(before, during, after, stays)

    def sums(self, local: NDArray[Any], up: NDArray[Any] | float = 0.0) -> Floats:
        """(m,) at each step the sum of `local` over the rows that stay, and of `up` over the others, (n,) each."""
        up = np.broadcast_to(np.asarray(up, np.float64), local.shape)
        gained = np.bincount(self.stays, local - up, len(self.after)).astype(np.float64)
        return np.cumsum(gained) + float(up.sum())

    def walk(self, holds: Bools, *, back: bool = False) -> Thresholds:
        """The last step before the first that does not hold, (m,), from where everything escalates on; `back`: from
        where nothing does. Where the walk begins nothing has to be shown.
        """
        steps = np.arange(len(holds))[:: -1 if back else 1]
        failing = np.flatnonzero(~holds[steps])
        step = steps[max(0, int(failing[0]) - 1) if len(failing) else -1]
        return Thresholds(float(self.before[step]), float(self.during[step]), float(self.after[step]))


def _early(early: Floats, judged: Floats, levels: Floats) -> Floats:
    """(m,) the lowest threshold under which an early gate sends up no more than it may of the rows that the last gate
    keeps local at a level; at the last level none.
    """
    allowed = int(_EARLY_WASTE * len(early))
    order = np.argsort(judged)
    highest: list[float] = []  # a heap of one more than are allowed
    lowest = [ALWAYS]
    for p_gain in early[order].tolist():
        if len(highest) > allowed:
            heappushpop(highest, p_gain)
        else:
            heappush(highest, p_gain)
        lowest.append(highest[0] if len(highest) > allowed else ALWAYS)
    found = np.array(lowest)[np.searchsorted(judged[order], levels, side="right")]
    found[-1] = NEVER
    return found
