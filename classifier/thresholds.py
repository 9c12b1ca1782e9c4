"""From a stated quality to thresholds on P(gain), with a stated confidence (risk control by fixed-sequence testing).

`quality` q asks that the routed score is at least q times the score of the cloud alone. A row's slack is
`routed - q * cloud`; a threshold is safe when the mean slack of the user's next `HORIZON` requests is positive: their
luck is part of the margin, not only ours in calibrating (a one-sided prediction bound instead of one on the endless
mean, which a user never sees). Thresholds are tested from the safest on, and
the walk stops at the first that cannot be shown safe, so no correction for multiple tests is due (Angelopoulos et al.,
"Learn then Test", 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from .metrics import Bools, Floats

TARGETS = (0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)
CONFIDENCE = 0.95
HORIZON = 2_000

_ALWAYS = -1.0
_PATH_STEPS = 200
# Gates 1 and 2 save local time but may be wrong: together they may escalate this share of all rows against gate 3's
# judgement, half of it each.
_EARLY_WASTE = 0.02


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Escalate where P(gain) is above the value: before generation, during it, after it. -1 escalates always."""

    before: float
    during: float
    after: float


@dataclass(frozen=True, slots=True)
class CascadeRows:
    """Rows to simulate the cascade on: each gate's P(gain) and both tiers' scores, all (n,) float64."""

    before: Floats
    during: Floats
    after: Floats
    local_score: Floats
    cloud_score: Floats


@dataclass(frozen=True, slots=True)
class Target:
    """A calibrated quality target: its thresholds and what the calibration rows predict under them.

    With probability `confidence` the next `horizon` requests keep `quality`. `predicted_quality` is the routed over the
    cloud score, `cloud_share` the share of all rows that escalate, `before_share` and `during_share` the parts of it
    that gates 1 and 2 take.
    """

    quality: float
    confidence: float
    horizon: int
    thresholds: Thresholds
    predicted_quality: float
    cloud_share: float
    before_share: float
    during_share: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What the cascade did on some rows: mean scores and the share each gate escalated."""

    routed: float
    local: float
    cloud: float
    cloud_share: float
    before_share: float
    during_share: float

    @property
    def quality(self) -> float:
        return self.routed / self.cloud if self.cloud else 1.0


def escalated(rows: CascadeRows, thresholds: Thresholds) -> Bools:
    """(n,) which rows go to the cloud."""
    early = (rows.before > thresholds.before) | (rows.during > thresholds.during)
    return early | (rows.after > thresholds.after)


def simulate(rows: CascadeRows, thresholds: Thresholds) -> Simulation:
    up = escalated(rows, thresholds)
    first = rows.before > thresholds.before
    second = ~first & (rows.during > thresholds.during)
    routed = np.where(up, rows.cloud_score, rows.local_score)
    return Simulation(
        routed=float(routed.mean()),
        local=float(rows.local_score.mean()),
        cloud=float(rows.cloud_score.mean()),
        cloud_share=float(up.mean()),
        before_share=float(first.mean()),
        during_share=float(second.mean()),
    )


def choose_thresholds(
    rows: CascadeRows,
    targets: Sequence[float] = TARGETS,
    *,
    confidence: float = CONFIDENCE,
    horizon: int = HORIZON,
) -> list[Target]:
    """For every target the thresholds with the least cloud share that are safe at `confidence`, strictest target last.

    Where nothing less can be shown safe, everything escalates, which meets any target exactly. Scores must be in [0, 1]
    and P(gain) cross-fitted: rows the gates were fitted on would look better than they are.
    """
    path = _path(rows)
    found: list[Target] = []
    for quality in sorted(targets):
        best = Thresholds(_ALWAYS, _ALWAYS, _ALWAYS)
        for candidate in path:
            routed = np.where(escalated(rows, candidate), rows.cloud_score, rows.local_score)
            if not stays_positive(routed - quality * rows.cloud_score, confidence, horizon):
                break
            best = candidate
        simulation = simulate(rows, best)
        found.append(
            Target(
                quality,
                confidence,
                horizon,
                best,
                simulation.quality,
                simulation.cloud_share,
                simulation.before_share,
                simulation.during_share,
            )
        )
    return found


def stays_positive(slack: Floats, confidence: float, horizon: int) -> bool:
    """Whether the mean of `horizon` further rows like those of `slack` is above zero, with the given probability.

    `slack`: independent rows, each in [-1, 1]. A normal prediction bound made safe for rare losses, where the plain one
    is too bold: one row of the worst value is added, and the Cornish-Fisher term for the skew of a rare loss.
    """
    z = NormalDist().inv_cdf(confidence)
    rows = np.append(slack, -1.0)
    ours, theirs = 1.0 / len(rows), 1.0 / horizon
    skew = max(0.0, z * z - 1.0) / 3.0 * (ours + theirs)
    return bool(rows.mean() - z * rows.std() * np.sqrt(ours + theirs) - skew > 0.0)


def _path(rows: CascadeRows) -> list[Thresholds]:
    """Candidates from the safest to the boldest. They depend on P(gain) only, never on the scores that test them."""
    levels = np.unique(np.quantile(rows.after, np.linspace(0.0, 1.0, _PATH_STEPS + 1)))
    budget = 0.5 * _EARLY_WASTE * len(rows.after)
    path: list[Thresholds] = []
    for level in levels:
        kept = rows.after <= level
        path.append(
            Thresholds(
                _least_wasteful(rows.before, kept, budget), _least_wasteful(rows.during, kept, budget), float(level)
            )
        )
    return path


def _least_wasteful(early: Floats, kept: Bools, budget: float) -> float:
    """The lowest threshold under which the early gate takes at most `budget` rows that gate 3 would have kept local."""
    rivals = np.sort(early[kept])[::-1]
    allowed = int(budget)
    return float(rivals[allowed]) if len(rivals) > allowed else _ALWAYS
