"""From a target to the thresholds of a text policy, with a stated confidence or on average, on its calibration rows.

Two quantities can be promised, each by the walk of `threshold_path.py`: the risk, which is the share of requests kept
local although only the cloud was right, and the share of requests that escalate. Both are bounded after Clopper and
Pearson, or on average by conformal risk control (Angelopoulos et al., 2022), which counts one row more as lost.
`quality` q comes down to a risk of (1 - q) times the cloud's own score: what is not lost is kept.
What requests cost is expected only: no answer is too long to be rare, and rows do not show what they do not hold.
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
from .threshold_path import Path, Thresholds, escalated

DELTA = 0.1
_ENDLESS = 10**12
_MOST_ROWS = 10**9
# The part of delta that goes to the cloud's own score where a quality is asked for.
_DELTA_OF_SCORE = 0.1


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Thresholds for a target, and what the calibration rows did under them."""

    target: Target
    # It holds with confidence 1 - delta or on average, as `target.promise` says. A cost is expected only.
    delta: float
    thresholds: Thresholds
    # The risk that is promised; None where the target is no quality.
    alpha: float | None
    # Observed: the share of requests that stay local although only the cloud was right.
    risk: float
    # Observed: the share of the cloud's score that is kept.
    quality: float
    # Observed.
    cloud_share: float
    # Observed: the cloud's score on the requests that escalate, which are the harder ones; None if none does.
    escalated_score: float | None
    # Observed: the share that gate 1 sends up.
    before_share: float
    # Observed, in US dollars per 1,000 requests.
    cost: float


def operating_point(
    rows: CalibrationRows, target: Target, delta: float = DELTA, path: Path | None = None
) -> OperatingPoint:
    """The best thresholds shown to keep `target`, with confidence 1 - `delta` or on average; for a cost, those that
    keep it on rows like these, with a margin for what varies among them.

    Best is the least cloud share for a quality, and the most cloud share for a limit on share or cost. Where nothing
    can be shown, everything escalates for a quality and nothing for a limit: that keeps any of them. `path`: of the
    rows, where it is known.
    """
    alpha = _alpha(rows, target, delta) if target.name == "quality" else None
    path = path or Path.of(rows)
    best = path.walk(_holds(path, rows, target, alpha, delta), back=alpha is None)
    return _observed(rows, best, target, alpha, delta)


@dataclass(frozen=True, slots=True)
class RowsNeeded:
    """The calibration rows that bolder thresholds take."""

    # With which any request could stay local, if none is lost.
    at_least: int
    # With which a share of `local` could, if `lost` of all requests are.
    rows: int
    # The share that stays under thresholds that lose half of what is allowed.
    local: float
    # The share of all requests that these lose.
    lost: float


def rows_needed(rows: CalibrationRows, target: Target, delta: float = DELTA) -> RowsNeeded | None:
    """The number of rows to calibrate on that bolder thresholds would take; None where it is no matter of rows."""
    alpha = _alpha(rows, target, delta) if target.name == "quality" else 0.0
    if alpha <= 0:
        return None

    def least(rate: float) -> int:
        if target.promise == "mean":
            return ceil(1.0 / (alpha - rate) - 1e-9)
        return min_rows(alpha, (1.0 - _DELTA_OF_SCORE) * delta, rate)

    path, n = Path.of(rows), len(rows.gain)
    up = escalated(rows, path.walk(path.sums(rows.gain) <= alpha / 2 * n))
    lost = float((rows.gain & ~up).mean())
    return RowsNeeded(least(0.0), least(lost), float(1 - up.mean()), lost)


def rows_to_promise(quality: float, cloud_score: float, delta: float = DELTA) -> int:
    """The least number of calibration rows that can promise a quality below 1, if none of them is lost."""

    def promises(n: int) -> bool:
        alpha = (1.0 - quality) * mean_lower_bound(cloud_score, n, _DELTA_OF_SCORE * delta)
        return n * log1p(-alpha) <= log((1.0 - _DELTA_OF_SCORE) * delta)  # as `max_losses` allows none

    return bisect_left(range(_MOST_ROWS), True, lo=1, key=promises)


def floor_of_risk(mu: float, alpha: float) -> float:
    """The least share that any method must send up, if only the cloud is right on `mu` of the requests and at most
    `alpha` of all may be lost: an oracle sends up gains only.
    """
    return max(0.0, mu - alpha)


def _alpha(rows: CalibrationRows, target: Target, delta: float) -> float:
    """The risk that a quality allows: its share of the cloud's score, which is itself only known to a bound.

    On average no bound is due: what is lost and what may be lost are added up over the same rows.
    """
    if target.promise == "mean":
        return (1.0 - target.value) * float(rows.cloud.mean())
    return (1.0 - target.value) * mean_lower_bound(float(rows.cloud.mean()), rows.evidence, _DELTA_OF_SCORE * delta)


def _holds(path: Path, rows: CalibrationRows, target: Target, alpha: float | None, delta: float) -> Bools:
    """(m,) at which steps of the path the target can be shown to hold."""
    n, evidence, mean = len(rows.gain), rows.evidence, target.promise == "mean"
    if alpha is not None:
        # What a row loses less what it may lose is at most 1, and only grows along the path.
        most = alpha * evidence - 1.0 + 1e-9 if mean else max_losses(evidence, alpha, (1.0 - _DELTA_OF_SCORE) * delta)
        return path.sums(rows.gain) * evidence <= most * n
    if target.name == "cloud_share":
        most = max_losses_on_average(evidence, target.value) if mean else max_losses(evidence, target.value, delta)
        # The bounds are for one threshold that is a row's own P(gain); each further one lets in about a row more.
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
