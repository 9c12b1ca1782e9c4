"""The cost-quality curve of a router and the figures read off it, by the protocol of RouteLLM (Ong et al., 2024).

Ten equal-mass bins of the score give eleven thresholds; each threshold gives a share of strong calls and an accuracy.
APGR is the area between that curve and the weak model's accuracy, over the same area of the strong model's. CPT(x) is
the share of strong calls at which x of the gap between weak and strong is recovered, linearly interpolated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Floats

_BINS = 10


@dataclass(frozen=True, slots=True)
class CostQualityCurve:
    """k points by rising share of strong calls."""

    # (k,) of strong calls, in [0, 1].
    share: Floats
    # (k,) in [0, 1].
    accuracy: Floats
    # Accuracy of the weak tier.
    weak: float
    # Accuracy of the strong tier.
    strong: float

    @property
    def apgr(self) -> float:
        """Average performance gap recovered; NaN where weak and strong are equally good."""
        gap = (self.strong - self.weak) * (self.share[-1] - self.share[0])
        area = np.trapezoid(self.accuracy - self.weak, self.share)
        return float(area / gap) if gap else float("nan")

    def cpt(self, recovered: float) -> float:
        """The share of strong calls that recovers `recovered` of the gap.

        Interpolated as RouteLLM does, by a bisection over the accuracies; where the curve falls back below the level
        that may name a later crossing than the first.
        """
        level = self.weak + recovered * (self.strong - self.weak)
        return float(np.interp(level, self.accuracy, self.share))


def cost_quality(scores: Floats, weak: Floats, strong: Floats, bins: int = _BINS) -> CostQualityCurve:
    """The protocol's curve of `scores` (higher: rather strong); all three (n,)."""
    thresholds = np.quantile(scores, np.linspace(0.0, 1.0, bins + 1))
    # The last threshold sends nothing up, the others what is at or above them.
    chosen = [scores >= threshold for threshold in thresholds[:-1]] + [scores > thresholds[-1]]
    points = [(up.mean(), np.where(up, strong, weak).mean()) for up in reversed(chosen)]
    share, accuracy = np.array(points, np.float64).T
    return CostQualityCurve(share, accuracy, float(weak.mean()), float(strong.mean()))


def fine_curve(scores: Floats, weak: Floats, strong: Floats) -> CostQualityCurve:
    """A point after every row, in falling order of score; of equal scores one point after the last."""
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    ends = np.append(np.flatnonzero(ordered[:-1] != ordered[1:]) + 1, len(scores))
    accuracy = weak.mean() + np.concatenate(([0.0], np.cumsum((strong - weak)[order]))) / len(scores)
    kept = np.concatenate(([0], ends))
    return CostQualityCurve(kept / len(scores), accuracy[kept], float(weak.mean()), float(strong.mean()))


def oracle_scores(weak: Floats, strong: Floats) -> Floats:
    """Scores that no router can beat: rows by what the strong tier gains, ties in the order of the rows."""
    return ranks(strong - weak)


def ranks(values: Floats) -> Floats:
    """From 0, equal values in their order."""
    found = np.empty(len(values))
    found[np.argsort(values, kind="stable")] = np.arange(len(values))
    return found
