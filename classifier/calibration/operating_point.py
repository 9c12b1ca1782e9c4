"""Thresholds for a target, from calibration rows, guaranteed at a promise level or on average.

Two quantities can be promised, each by the walk of `threshold_path.py`: the risk, which is the share of requests kept
local although only the cloud was right, and the cloud share, which is the share that escalates. Both are bounded by
Clopper-Pearson, or on average by conformal risk control (Angelopoulos et al., 2022), which counts one more row as lost.
A `quality` q allows a risk of (1 - q) times the cloud's own score. A cost is only an expectation: rare long answers may
be missing from the rows.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil, log, log1p

import numpy as np

from ..arrays import Bools
from ..target import Target
from .bounds import max_losses, max_losses_on_average, mean_lower_bound, min_rows, stays_positive
from .rows import CalibrationRows
from .threshold_path import ThresholdPath, Thresholds, escalated

PROMISE_LEVEL = 0.9
DELTA = 0.1  # 1 - PROMISE_LEVEL
_ENDLESS = 10**12
_MOST_ROWS = 10**9
# Part of delta spent on the bound of the cloud's own score, for a quality target.
_DELTA_OF_SCORE = 0.1


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Thresholds for a target, and their results on the calibration rows."""

    target: Target
    # The target is missed with at most this probability, unless `target.promise` is "mean" or the target is a cost.
    delta: float
    thresholds: Thresholds
    # Promised risk; None unless the target is a quality.
    alpha: float | None
    # Observed share of requests that stay local although only the cloud was right.
    risk: float
    # Observed share of the cloud's score that is kept.
    quality: float
    # Observed share of requests that escalate.
    cloud_share: float
    # Observed score of the cloud on escalated requests, which are harder than average; None if none escalates.
    escalated_score: float | None
    # Observed share of requests that gate 1 escalates.
    before_share: float
    # Observed cost in US dollars per 1,000 requests.
    cost: float


def operating_point(
    rows: CalibrationRows, target: Target, delta: float = DELTA, path: ThresholdPath | None = None
) -> OperatingPoint:
    """Return the best thresholds that can be shown to keep `target`, with probability 1 - `delta` or on average. A cost
    target is kept on rows like these, with a margin for their variance.

    Best means the lowest cloud share for a quality, and the highest for a limit on share or cost. If no threshold can
    be shown to keep the target, everything escalates for a quality, and nothing for a limit: this always keeps it.
    `path`: the path of `rows`, if already computed.
    """
    alpha = _alpha(rows, target, delta) if target.name == "quality" else None
    path = path or ThresholdPath.of(rows)
    best = path.walk(_holds(path, rows, target, alpha, delta), back=alpha is None)
    return _observed(rows, best, target, alpha, delta)


@dataclass(frozen=True, slots=True)
class RowsNeeded:
    """Numbers of calibration rows that bolder thresholds need."""

    # Rows needed before any request can stay local, if no row is lost (local although only the cloud is right).
    at_least: int
    # Rows needed for the share `local` to stay local, if `lost` of all requests are lost.
    rows: int
    # Share that stays local under thresholds that lose half of the allowed risk.
    local: float
    # Share of all requests lost under these thresholds.
    lost: float


def rows_needed(rows: CalibrationRows, target: Target, delta: float = DELTA) -> RowsNeeded | None:
    """Return the calibration rows needed for bolder thresholds; None if more rows cannot help."""
    alpha = _alpha(rows, target, delta) if target.name == "quality" else 0.0
    if alpha <= 0:
        return None

    def least(rate: float) -> int:
        if target.promise == "mean":
            return ceil(1.0 / (alpha - rate) - 1e-9)
        return min_rows(alpha, (1.0 - _DELTA_OF_SCORE) * delta, rate)

    path, n = ThresholdPath.of(rows), len(rows.gain)
    up = escalated(rows, path.walk(path.sums(rows.gain) <= alpha / 2 * n))
    lost = float((rows.gain & ~up).mean())
    return RowsNeeded(least(0.0), least(lost), float(1 - up.mean()), lost)


def rows_to_promise(quality: float, cloud_score: float, delta: float = DELTA) -> int:
    """Return the least number of calibration rows that can promise a quality below 1, if no row is lost."""

    def promises(n: int) -> bool:
        alpha = (1.0 - quality) * mean_lower_bound(cloud_score, n, _DELTA_OF_SCORE * delta)
        return n * log1p(-alpha) <= log((1.0 - _DELTA_OF_SCORE) * delta)  # `max_losses` then allows 0 losses

    return bisect_left(range(_MOST_ROWS), True, lo=1, key=promises)


def least_cloud_share(mu: float, alpha: float) -> float:
    """Return the least share that any method must escalate if only the cloud is right on `mu` of the requests and at
    most `alpha` of all requests may be lost. An oracle, which escalates only gains, reaches this share.
    """
    return max(0.0, mu - alpha)


def _alpha(rows: CalibrationRows, target: Target, delta: float) -> float:
    """Return the risk that a quality allows: (1 - quality) times a lower bound on the cloud's score.

    A promise on average needs no bound, because losses and allowed losses are summed over the same rows.
    """
    if target.promise == "mean":
        return (1.0 - target.value) * float(rows.cloud.mean())
    return (1.0 - target.value) * mean_lower_bound(float(rows.cloud.mean()), rows.evidence, _DELTA_OF_SCORE * delta)


def _holds(path: ThresholdPath, rows: CalibrationRows, target: Target, alpha: float | None, delta: float) -> Bools:
    """Return the steps of the path, (m,) bool, at which the target can be shown to hold."""
    n, evidence, mean = len(rows.gain), rows.evidence, target.promise == "mean"
    if alpha is not None:
        # Along the path, a row's loss minus its allowed loss never falls, and is at most 1: conformal risk control.
        most = alpha * evidence - 1.0 + 1e-9 if mean else max_losses(evidence, alpha, (1.0 - _DELTA_OF_SCORE) * delta)
        return path.sums(rows.gain) * evidence <= most * n
    if target.name == "cloud_share":
        most = max_losses_on_average(evidence, target.value) if mean else max_losses(evidence, target.value, delta)
        # The bounds hold for a single threshold at a row's own P(gain). Each further gate may exceed them by one row.
        most -= sum(gate is not None for gate in (rows.after, rows.during))
        return path.sums(np.zeros(n), 1.0) * evidence <= most * n
    dollars = rows.dollars(target)
    limit, dearest = target.value / 1000, max(float(dollars.max()), target.value / 1000, 1e-12)
    local, up = np.full(n, limit / dearest), (limit - dollars) / dearest
    slack, square = path.sums(local, up) / n, path.sums(local**2, up**2) / n
    return stays_positive(slack, square, n, 1.0 - delta, _ENDLESS)


def _observed(
    rows: CalibrationRows, thresholds: Thresholds, target: Target, alpha: float | None, delta: float
) -> OperatingPoint:
    up = escalated(rows, thresholds)
    cloud = float(rows.cloud.mean())
    return OperatingPoint(
        target=target,
        delta=delta,
        thresholds=thresholds,
        alpha=alpha,
        risk=float((rows.gain & ~up).mean()),
        quality=float(np.where(up, rows.cloud, rows.local).mean()) / cloud if cloud else 1.0,
        cloud_share=float(up.mean()),
        escalated_score=float(rows.cloud[up].mean()) if up.any() else None,
        before_share=float((rows.before > thresholds.before).mean()),
        cost=1000 * float(np.where(up, rows.dollars(target), 0.0).mean()),
    )
