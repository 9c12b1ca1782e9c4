"""Cost-quality curves of a router and the figures derived from them, by the protocol of RouteLLM (Ong et al., 2024).

Ten equal-mass bins of the router's score give eleven thresholds, each with a share of strong calls (calls to the
strong model) and an accuracy. APGR is the area between this curve and the weak model's accuracy, divided by the area
between the strong and the weak model's accuracy. CPT(x) is the share of strong calls, found by linear interpolation,
that recovers the share x of the accuracy gap between the two models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Floats

_BINS = 10


@dataclass(frozen=True, slots=True)
class CostQualityCurve:
    """A cost-quality curve of k points, in ascending order of the share of strong calls."""

    # (k,) share of calls to the strong model, in [0, 1].
    share: Floats
    # (k,) accuracy of the routed answers, in [0, 1].
    accuracy: Floats
    # Accuracy of the weak tier.
    weak: float
    # Accuracy of the strong tier.
    strong: float

    @property
    def apgr(self) -> float:
        """Average performance gap recovered; NaN if weak and strong are equally good."""
        gap = (self.strong - self.weak) * (self.share[-1] - self.share[0])
        area = np.trapezoid(self.accuracy - self.weak, self.share)
        return float(area / gap) if gap else float("nan")

    def cpt(self, recovered: float) -> float:
        """Return the share of strong calls that recovers the share `recovered` of the accuracy gap.

        Interpolates by bisection over the accuracies, like RouteLLM. If the curve crosses the wanted accuracy several
        times, the result is one of the crossings, not always the first.
        """
        level = self.weak + recovered * (self.strong - self.weak)
        return float(np.interp(level, self.accuracy, self.share))


def cost_quality(scores: Floats, weak: Floats, strong: Floats, bins: int = _BINS) -> CostQualityCurve:
    """Compute RouteLLM's curve from `scores`, which are higher for rows that need the strong tier. Arrays are (n,)."""
    thresholds = np.quantile(scores, np.linspace(0.0, 1.0, bins + 1))
    # Each threshold escalates the rows at or above it, except the last threshold, which escalates none.
    chosen = [scores >= threshold for threshold in thresholds[:-1]] + [scores > thresholds[-1]]
    points = [(up.mean(), np.where(up, strong, weak).mean()) for up in reversed(chosen)]
    share, accuracy = np.array(points, np.float64).T
    return CostQualityCurve(share, accuracy, float(weak.mean()), float(strong.mean()))


def fine_curve(scores: Floats, weak: Floats, strong: Floats) -> CostQualityCurve:
    """Compute the curve with a point after each row, in descending order of score; equal scores share a point."""
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    ends = np.append(np.flatnonzero(ordered[:-1] != ordered[1:]) + 1, len(scores))
    accuracy = weak.mean() + np.concatenate(([0.0], np.cumsum((strong - weak)[order]))) / len(scores)
    cuts = np.concatenate(([0], ends))
    return CostQualityCurve(cuts / len(scores), accuracy[cuts], float(weak.mean()), float(strong.mean()))


def oracle_scores(weak: Floats, strong: Floats) -> Floats:
    """Return scores that no router can beat: rows ranked by the strong tier's gain, ties in row order."""
    return ranks(strong - weak)


def ranks(values: Floats) -> Floats:
    """Return the rank of each value, from 0; equal values keep their order."""
    ranked = np.empty(len(values))
    ranked[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranked
