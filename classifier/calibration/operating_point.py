"""Gate thresholds, computed from calibration rows, that keep a target with a stated probability or on average.

Two quantities can be promised: the risk, which is the share of requests that stay local although only the cloud was
right, and the cloud share, which is the share of requests that escalate. Each is bounded by Clopper-Pearson, or on
average by conformal risk control (Angelopoulos et al., 2022), which counts one additional row as lost. A `quality` q
allows a risk of (1 - q) times the cloud's own score. With the promise `net`, betting bounds the average score instead.
A cost is not promised but only expected, because the calibration rows may lack rare long answers.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil, log, log1p

import numpy as np

from ..arrays import Bools
from ..licences.betting import num_licensed, rows_to_license
from ..target import Target
from .bounds import max_losses, max_losses_on_average, mean_lower_bound, min_rows, stays_positive
from .rows import CalibrationRows
from .threshold_path import ThresholdPath, Thresholds, escalated

PROMISE_LEVEL = 0.9
DELTA = 0.1  # probability that a promise fails: 1 - PROMISE_LEVEL
_ENDLESS = 10**12
_LADDER_STEPS = 20
_MOST_ROWS = 10**9
# Part of delta that a quality target reserves for the error of the cloud's estimated score.
_DELTA_OF_SCORE = 0.1


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Thresholds for a target, and their results on the calibration rows."""

    target: Target
    # The target is missed with at most this probability, unless `target.promise` is "mean" or the target is a cost.
    delta: float
    thresholds: Thresholds
    # Highest risk that the promise allows; None unless the target is a quality whose losses are counted.
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
    """Return the best thresholds that can be shown to keep `target`, with probability 1 - `delta` or on average.

    For a quality, the best thresholds escalate the fewest requests; for a limit on cloud share or cost, the most. If no
    thresholds can be shown to keep the target, the result always keeps it: all requests escalate for a quality, none
    for a limit. A cost is kept for requests that resemble the rows, with a margin for the variance of the cost.
    `path`: the threshold path of `rows`, if already computed.
    """
    alpha = _alpha(rows, target, delta) if _counts_losses(rows, target) else None
    path = path or ThresholdPath.of(rows)
    best = path.walk(_holds(path, rows, target, alpha, delta), back=target.name != "quality")
    return _observed(rows, best, target, alpha, delta)


@dataclass(frozen=True, slots=True)
class RowsNeeded:
    """Numbers of calibration rows needed to keep more requests local."""

    # Rows needed to keep any request local, if no row is lost. A lost row stays local although only the cloud is right.
    at_least: int
    # Rows needed to keep the share `local` of all requests local, if the share `lost` of all requests is lost.
    rows: int
    # Share of requests that stay local with thresholds that use up half of the allowed risk.
    local: float
    # Share of all requests that are lost with the thresholds of `local`.
    lost: float


def rows_needed(rows: CalibrationRows, target: Target, delta: float = DELTA) -> RowsNeeded | None:
    """Return how many calibration rows are needed to keep more requests local; None if more rows cannot help."""
    if target.name != "quality":
        return None
    if not _counts_losses(rows, target):
        return _rows_needed_net(rows, target.value, delta)
    alpha = _alpha(rows, target, delta)
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
    """Return the minimum number of calibration rows that can promise `quality` (below 1), if no row is lost."""

    def promises(n: int) -> bool:
        alpha = (1.0 - quality) * mean_lower_bound(cloud_score, n, _DELTA_OF_SCORE * delta)
        return n * log1p(-alpha) <= log((1.0 - _DELTA_OF_SCORE) * delta)  # equivalent to `max_losses` >= 0

    return bisect_left(range(_MOST_ROWS), True, lo=1, key=promises)


def least_cloud_share(mu: float, alpha: float) -> float:
    """Return the smallest share of requests that any router must escalate.

    Only the cloud is right on the share `mu` of all requests; at most the share `alpha` may stay local nevertheless.
    An oracle, which escalates only requests on which the cloud alone is right, reaches this minimum.
    """
    return max(0.0, mu - alpha)


def _counts_losses(rows: CalibrationRows, target: Target) -> bool:
    """Return whether a quality is kept by counting losses.

    If the cloud is always right, as when answers are graded by agreement with it, the promises `net` and `no-loss` are
    the same, and counting needs fewer rows than betting. Partial scores would count as whole losses.
    """
    is_exact = bool((rows.cloud == 1).all()) and bool(np.isin(rows.local, (0, 1)).all())
    return target.name == "quality" and (target.promise != "net" or is_exact)


def _alpha(rows: CalibrationRows, target: Target, delta: float) -> float:
    """Return the risk that a quality target allows: (1 - quality) times a lower bound on the cloud's mean score.

    A promise on average uses the observed mean, because losses and allowed losses are summed over the same rows.
    """
    if target.promise == "mean":
        return (1.0 - target.value) * float(rows.cloud.mean())
    return (1.0 - target.value) * mean_lower_bound(float(rows.cloud.mean()), rows.evidence, _DELTA_OF_SCORE * delta)


def _holds(path: ThresholdPath, rows: CalibrationRows, target: Target, alpha: float | None, delta: float) -> Bools:
    """Return for each step of the path, (m,), whether the target can be shown to hold at this step."""
    n, evidence, mean = len(rows.gain), rows.evidence, target.promise == "mean"
    if alpha is not None:
        # Conformal risk control applies: loss minus allowed loss is at most 1 per row and never falls along the path.
        most = alpha * evidence - 1.0 + 1e-9 if mean else max_losses(evidence, alpha, (1.0 - _DELTA_OF_SCORE) * delta)
        return path.sums(rows.gain) * evidence <= most * n
    if target.name == "quality":
        return _net_holds(path, rows, target.value, delta)
    if target.name == "cloud_share":
        most = max_losses_on_average(evidence, target.value) if mean else max_losses(evidence, target.value, delta)
        # The bounds assume one gate, whose threshold is a row's P(gain). Each further gate may escalate one more row.
        most -= sum(gate is not None for gate in (rows.after, rows.during))
        return path.sums(np.zeros(n), 1.0) * evidence <= most * n
    dollars = rows.dollars(target)
    limit, dearest = target.value / 1000, max(float(dollars.max()), target.value / 1000, 1e-12)
    local, up = np.full(n, limit / dearest), (limit - dollars) / dearest
    slack, square = path.sums(local, up) / n, path.sums(local**2, up**2) / n
    return stays_positive(slack, square, n, 1.0 - delta, _ENDLESS)


def _net_holds(path: ThresholdPath, rows: CalibrationRows, quality: float, delta: float) -> Bools:
    """Return the steps of the path, (m,), up to the last of `_LADDER_STEPS` that rows in a random order license."""
    steps = np.quantile(path.stays, np.arange(1, _LADDER_STEPS + 1) / _LADDER_STEPS, method="inverted_cdf")
    order = np.random.default_rng(0).permutation(len(rows.local))
    routed = np.where(path.stays[order, None] <= steps, rows.local[order, None], rows.cloud[order, None])
    share = rows.evidence / len(rows.local)
    licensed = num_licensed(routed - quality * rows.cloud[order, None], delta, quality, share)
    last = steps[licensed - 1] if licensed else 0
    return np.arange(len(path.after)) <= last


def _rows_needed_net(rows: CalibrationRows, quality: float, delta: float) -> RowsNeeded | None:
    """Return `rows_needed` for half of the allowed loss; `at_least` holds if both answers score 1 in all rows."""
    path = ThresholdPath.of(rows)
    worth = path.sums(rows.local - quality * rows.cloud, (1.0 - quality) * rows.cloud) / len(rows.local)
    up = escalated(rows, path.walk(worth >= (1.0 - quality) / 2 * rows.cloud.mean()))
    needed = rows_to_license(np.where(up, rows.cloud, rows.local) - quality * rows.cloud, delta, quality)
    least = rows_to_license(np.array([1.0 - quality]), delta, quality)
    if needed is None or least is None:
        return None
    return RowsNeeded(least, needed, float(1 - up.mean()), float((rows.gain & ~up).mean()))


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
