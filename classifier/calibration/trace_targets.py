"""From a stated quality to thresholds on P(gain), with a stated confidence, on graded runs of a pair.

`quality` q asks that the routed score is at least q times the score of the cloud alone. A row's slack is
`routed - q * cloud`; a threshold is safe when the mean slack of the user's next `HORIZON` requests is positive: their
luck is part of the margin, not only ours in calibrating (a one-sided prediction bound instead of one on the endless
mean, which a user never sees).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Floats
from .bounds import stays_positive
from .threshold_path import Path, Thresholds, escalated

TARGETS = (0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)
CONFIDENCE = 0.95
HORIZON = 2_000


@dataclass(frozen=True, slots=True)
class CascadeRows:
    """Rows to simulate the cascade on: each gate's P(gain) and both tiers' scores, all (n,) float64."""

    before: Floats
    during: Floats
    after: Floats
    local_score: Floats
    cloud_score: Floats


@dataclass(frozen=True, slots=True)
class CalibratedTarget:
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
) -> list[CalibratedTarget]:
    """For every target the thresholds with the least cloud share that are safe at `confidence`, strictest target last.

    Where nothing less can be shown safe, everything escalates, which meets any target exactly. Scores must be in [0, 1]
    and P(gain) cross-fitted: rows the gates were fitted on would look better than they are.
    """
    path, n = Path.of(rows), len(rows.after)
    found: list[CalibratedTarget] = []
    for quality in sorted(targets):
        local, up = rows.local_score - quality * rows.cloud_score, (1.0 - quality) * rows.cloud_score
        slack, square = path.sums(local, up) / n, path.sums(local**2, up**2) / n
        best = path.walk(stays_positive(slack, square, n, confidence, horizon))
        simulation = simulate(rows, best)
        found.append(
            CalibratedTarget(
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
