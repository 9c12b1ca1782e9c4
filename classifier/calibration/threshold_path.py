"""Thresholds on P(gain) (the probability that the cloud is better), and a path from all requests escalating to none.

Callers test each step of the path against their target, and `walk` stops before the first step that fails. This needs
no correction for multiple tests (Angelopoulos et al., "Learn then Test", 2021), because the path depends on P(gain)
alone, never on the scores used in the tests, and a row that stays local at one step stays local at the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappush, heappushpop
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..arrays import Bools, Floats

ALWAYS, NEVER = -1.0, 1.0
# Gates 1 and 2 escalate early to save local time. Each may escalate this share of all rows against gate 3's decision.
_EARLY_WASTE = 0.01


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds on P(gain), the probability that the cloud is better. A higher P(gain) escalates (-1: always)."""

    # Threshold of gate 1, before generation.
    before: float
    # Threshold of gate 2, during generation.
    during: float
    # Threshold of gate 3, after generation.
    after: float


class GateProbabilities(Protocol):
    """P(gain), the probability that the cloud is better, from each available gate: (n,) float64 in [0, 1]."""

    @property
    def before(self) -> Floats: ...
    @property
    def during(self) -> Floats | None: ...
    @property
    def after(self) -> Floats | None: ...


def escalated(rows: GateProbabilities, thresholds: Thresholds) -> Bools:
    """Return which rows escalate, (n,)."""
    up = rows.before > thresholds.before
    if rows.during is not None:
        up = up | (rows.during > thresholds.during)
    return up if rows.after is None else up | (rows.after > thresholds.after)


@dataclass(frozen=True, slots=True)
class ThresholdPath:
    """Path of m threshold settings, from escalating every request to escalating none."""

    # (m,) thresholds of gates 1, 2 and 3 at each step, ascending.
    before: Floats
    during: Floats
    after: Floats
    # (n,) first step at which each row stays local.
    stays: NDArray[np.intp]

    @classmethod
    def of(cls, rows: GateProbabilities) -> ThresholdPath:
        """Build a path with a step for each P(gain) of the last gate. `_EARLY_WASTE` bounds the other gates' waste."""
        judged = rows.before if rows.after is None else rows.after
        after = np.concatenate(([ALWAYS], np.unique(judged), [NEVER]))
        before, during = after, np.full(len(after), NEVER)
        stays = np.searchsorted(after, judged)
        if rows.after is not None:
            before = _early_thresholds(rows.before, judged, after)
            stays = np.maximum(stays, np.searchsorted(before, rows.before))
            if rows.during is not None:
                during = _early_thresholds(rows.during, judged, after)
                stays = np.maximum(stays, np.searchsorted(during, rows.during))
        return cls(before, during, after, stays)

    def sums(self, local: NDArray[Any], up: NDArray[Any] | float = 0.0) -> Floats:
        """Return for each step, (m,), the sum of `local` over rows that stay local and `up` over rows that escalate."""
        up = np.broadcast_to(np.asarray(up, np.float64), local.shape)
        gained = np.bincount(self.stays, local - up, len(self.after)).astype(np.float64)
        return np.cumsum(gained) + float(up.sum())

    def walk(self, holds: Bools, *, back: bool = False) -> Thresholds:
        """Return the thresholds of the last step before `holds`, (m,), becomes false. The walk starts at the step that
        escalates every request (with `back`, no request). The starting step always counts as true.
        """
        steps = np.arange(len(holds))[:: -1 if back else 1]
        failing = np.flatnonzero(~holds[steps])
        step = steps[max(0, int(failing[0]) - 1) if len(failing) else -1]
        return Thresholds(float(self.before[step]), float(self.during[step]), float(self.after[step]))


def _early_thresholds(early: Floats, judged: Floats, levels: Floats) -> Floats:
    """Return an early gate's threshold for each threshold of the last gate (`levels`), (m,). Each is the lowest at
    which the early gate escalates only a few rows (`_EARLY_WASTE` of all rows) that the last gate would keep local.
    The last threshold is NEVER.
    """
    allowed = int(_EARLY_WASTE * len(early))
    order = np.argsort(judged)
    highest: list[float] = []  # min-heap of the `allowed` + 1 highest values so far
    lowest = [ALWAYS]
    for p_gain in early[order].tolist():
        if len(highest) > allowed:
            heappushpop(highest, p_gain)
        else:
            heappush(highest, p_gain)
        lowest.append(highest[0] if len(highest) > allowed else ALWAYS)
    thresholds = np.array(lowest)[np.searchsorted(judged[order], levels, side="right")]
    thresholds[-1] = NEVER
    return thresholds
