"""From a target to the thresholds of a text policy, with a stated confidence or on average, on its calibration rows.

Two quantities can be promised, each by a walk along a fixed path of thresholds from the safest on, which stops at
the first that cannot be shown to hold (Angelopoulos et al., "Learn then Test", 2021): the risk, which is the share of
requests kept local although only the cloud was right, and the share of requests that go up. Shares are bounded after
Clopper and Pearson, or on average by conformal risk control (Angelopoulos et al., 2022), which counts one row more as
lost. `quality` q comes down to a risk of (1 - q) times the cloud's own score: what is not lost is kept.
What requests cost is expected only: no answer is too long to be rare, and rows do not show what they do not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from .aim import Aim
from .calibration_rows import CalibrationRows
from .guarantee import DELTA, most_of, most_on_average
from .metrics import Bools, Floats
from .thresholds import Thresholds, stays_positive

__all__ = ["OperatingPoint", "floor_of_risk", "floor_of_share", "operating_point"]

NEVER, ALWAYS = 1.0, -1.0
ALL_UP, NONE_UP = Thresholds(ALWAYS, NEVER, ALWAYS), Thresholds(NEVER, NEVER, NEVER)
_ENDLESS = 10**12
_STEPS = 400
# Gates 1 and 2 save local time but may be wrong: each may send up this share of all rows against gate 3's judgement.
_EARLY_WASTE = 0.01
# The part of delta that goes to the cloud's own score where a quality is asked for.
_DELTA_OF_SCORE = 0.1


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Thresholds for `aim`, which holds with confidence 1 - `delta` or on average, as `aim.promise` says (a cost is
    expected only), and what the calibration rows did under them.

    `alpha`: the risk that is promised; None where the target is no quality. `risk`, `quality`, `cloud_share`,
    `before_share` (what gate 1 sends up) and `cost` (US dollars per 1,000 requests) are observed.
    """

    aim: Aim
    delta: float
    thresholds: Thresholds
    alpha: float | None
    risk: float
    quality: float
    cloud_share: float
    before_share: float
    cost: float


def operating_point(rows: CalibrationRows, aim: Aim, delta: float = DELTA) -> OperatingPoint:
    """The best thresholds shown to keep `aim`, with confidence 1 - `delta` or on average; for a cost, those that keep
    it on rows like these, with a margin for what varies among them.

    Best is the least cloud share for a quality, and the most cloud share for a limit on share or cost. Where nothing
    can be shown, everything goes up for a quality and nothing for a limit: that keeps any of them.
    """
    alpha = _alpha(rows, aim, delta) if aim.name == "quality" else None
    holds = _test(rows, aim, alpha, delta)
    best, levels = (ALL_UP, _levels(rows)) if alpha is not None else (NONE_UP, _levels(rows)[::-1])
    for level in levels:
        candidate = _at(rows, float(level))
        if not holds(_up(rows, candidate)):
            break
        best = candidate
    return _observed(rows, best, aim, alpha, delta)


def floor_of_risk(mu: float, alpha: float) -> float:
    """The least share that any method must send up, if only the cloud is right on `mu` of the requests and at most
    `alpha` of all may be lost: an oracle sends up gains only.
    """
    return max(0.0, mu - alpha)


def floor_of_share(mu: float, alpha: float) -> float:
    """The same where at most `alpha` of those that *stay* may be lost: (mu - alpha) / (1 - alpha)."""
    return max(0.0, (mu - alpha) / (1.0 - alpha)) if alpha < 1 else 0.0


def _alpha(rows: CalibrationRows, aim: Aim, delta: float) -> float:
    """The risk that a quality allows: its share of the cloud's score, which is itself only known to a bound.

    On average no bound is due: what is lost and what may be lost are added up over the same rows.
    """
    if aim.promise == "mean":
        return (1.0 - aim.value) * float(rows.cloud.mean())
    slack = sqrt(log(1 / (_DELTA_OF_SCORE * delta)) / (2 * rows.evidence))  # Hoeffding
    return (1.0 - aim.value) * max(0.0, float(rows.cloud.mean()) - slack)


def _test(rows: CalibrationRows, aim: Aim, alpha: float | None, delta: float) -> Callable[[Bools], bool]:
    """Whether the aim can be shown to hold when the rows of a mask go up."""
    n, evidence = len(rows.gain), rows.evidence
    if alpha is not None and aim.promise == "mean":
        # What a row loses less what it may lose is at most 1, and only grows along the path.
        return lambda up: float((rows.gain & ~up).mean()) * evidence + 1.0 <= alpha * evidence + 1e-9
    if alpha is not None:
        most = most_of(evidence, alpha, (1.0 - _DELTA_OF_SCORE) * delta)
        return lambda up: int((rows.gain & ~up).sum()) * evidence <= most * n
    if aim.name == "cloud_share":
        mean = aim.promise == "mean"
        most = most_on_average(evidence, aim.value) if mean else most_of(evidence, aim.value, delta)
        # The bounds are for one threshold that is a row's own P(gain); each further one lets in about a row more.
        most -= sum(gate is not None for gate in (rows.after, rows.during))
        return lambda up: int(up.sum()) * evidence <= most * n
    dollars = rows.dollars(aim)
    limit, dearest = aim.value / 1000, max(float(dollars.max()), aim.value / 1000, 1e-12)
    return lambda up: stays_positive((limit - np.where(up, dollars, 0.0)) / dearest, 1.0 - delta, _ENDLESS)


def _levels(rows: CalibrationRows) -> Floats:
    observed = np.unique(rows.judged)
    return observed if len(observed) <= _STEPS else np.quantile(observed, np.linspace(0.0, 1.0, _STEPS + 1))


def _at(rows: CalibrationRows, level: float) -> Thresholds:
    """A step of the path; the higher `level`, the more stays local, and what stayed at a lower one stays."""
    if rows.after is None:
        return Thresholds(level, NEVER, level)
    kept = rows.after <= level
    during = NEVER if rows.during is None else _least_wasteful(rows.during, kept)
    return Thresholds(_least_wasteful(rows.before, kept), during, level)


def _least_wasteful(early: Floats, kept: Bools) -> float:
    """The lowest threshold under which the early gate sends up at most its allowance of the rows `kept` local."""
    rivals = np.sort(early[kept])[::-1]
    allowed = int(_EARLY_WASTE * len(early))
    return float(rivals[allowed]) if len(rivals) > allowed else ALWAYS


def _up(rows: CalibrationRows, thresholds: Thresholds) -> Bools:
    up = (rows.before > thresholds.before) | (rows.judged > thresholds.after)
    return up if rows.during is None else up | (rows.during > thresholds.during)


def _observed(
    rows: CalibrationRows, thresholds: Thresholds, aim: Aim, alpha: float | None, delta: float
) -> OperatingPoint:
    up = _up(rows, thresholds)
    cloud = float(rows.cloud.mean())
    return OperatingPoint(
        aim=aim,
        delta=delta,
        thresholds=thresholds,
        alpha=alpha,
        risk=float((rows.gain & ~up).mean()),
        quality=float(np.where(up, rows.cloud, rows.local).mean()) / cloud if cloud else 1.0,
        cloud_share=float(up.mean()),
        before_share=float((rows.before > thresholds.before).mean()),
        cost=1000 * float(np.where(up, rows.dollars(aim), 0.0).mean()),
    )
