"""Quality of a policy on rows not used for fitting: ranking, calibration, unseen kinds, and routing.

The results are dataclasses that serialize to JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..classifier.arrays import Bools, Floats
from ..classifier.calibration.operating_point import OperatingPoint
from ..classifier.calibration.rows import CalibrationRows
from ..classifier.calibration.threshold_path import Thresholds, escalated
from ..classifier.evaluation.metrics import ECE_BINS, ReliabilityBin, auroc, bootstrap, ece, reliability
from ..classifier.evaluation.single_signals import MEAN_LOGPROB, SINGLE_SIGNALS, single_signal
from ..classifier.features.blocks import view_of
from ..classifier.features.feature_rows import featurise, has_opening
from ..classifier.graded_row import GradedRow, scores
from ..classifier.policy.exported_gates import ExportedGates
from ..classifier.training.gates import FittedGates, TrainingData

Grouping = Literal["kind", "family"]
_MIN_CLASS_ROWS = 5


@dataclass(frozen=True, slots=True)
class GateReport:
    """Results of one gate on the held-out rows."""

    # AUROC of P(gain) as a detector of wrong local answers, with a 95 % bootstrap interval.
    auroc_wrong: float
    auroc_wrong_interval: tuple[float, float]
    auroc_gain: float
    # Expected calibration error over `ece_bins` equal-mass bins of P(gain).
    ece: float
    ece_bins: int
    reliability: list[ReliabilityBin]


@dataclass(frozen=True, slots=True)
class GroupReport:
    """Results on one kind or family. AUROCs are for detecting wrong local answers; NaN with few right or wrong ones."""

    group: str
    rows: int
    local_score: float
    cloud_score: float
    # AUROC of gate 3.
    auroc: float
    # AUROC of the mean log-probability.
    token_confidence: float


@dataclass(frozen=True, slots=True)
class LeaveOutReport:
    """Results of gate 3 on the rows of each group, when fitted without the rows of that group."""

    by: Grouping
    groups: list[GroupReport]
    median: float
    median_token_confidence: float


@dataclass(frozen=True, slots=True)
class RoutedReport:
    """Results of routing the held-out rows at one quality target."""

    target: float
    # Routed score over the cloud's score, with a 95 % interval by bootstrap.
    quality: float
    quality_interval: tuple[float, float]
    accuracy: float
    cloud_share: float
    # Parts of `cloud_share` due to gates 1 and 2.
    before_share: float
    during_share: float


@dataclass(frozen=True, slots=True)
class HeldOutReport:
    """All figures of a policy on held-out rows."""

    rows: int
    local_score: float
    cloud_score: float
    wrong_rate: float
    gain_rate: float
    gates: dict[str, GateReport]
    single_signals: dict[str, float]
    best_single_signal: str
    kinds: list[GroupReport]
    leave_out: list[LeaveOutReport]
    routed: list[RoutedReport]


def is_wrong(rows: Sequence[GradedRow]) -> Bools:
    """Return (n,) whether each local answer is wrong, that is, scored below one half."""
    return np.array([row.weak < 0.5 for row in rows], np.bool_)


def policy_probabilities(gates: ExportedGates, rows: Sequence[GradedRow]) -> CalibrationRows:
    """Return each row's scores, and its P(gain) by the exported gates, which judge row by row as in production."""
    views = [view_of(row) for row in rows]
    weak, strong = scores(rows)
    return CalibrationRows(
        before=np.array([gates.before(view.prompt) for view in views]),
        during=np.array([gates.during(view) for view in views]),
        after=np.array([gates.after(view) for view in views]),
        local=weak,
        cloud=strong,
        read=np.zeros(len(rows)),
        written=np.zeros(len(rows)),
    )


def evaluate(
    judged: CalibrationRows,
    rows: Sequence[GradedRow],
    points: Sequence[OperatingPoint],
    left_out: Sequence[LeaveOutReport] = (),
) -> HeldOutReport:
    """Report how well the gates' probabilities `judged` fit `rows`, and how `rows` are routed at each of `points`."""
    wrong, views = is_wrong(rows), [view_of(row) for row in rows]
    single = {name: auroc(single_signal(name, views), wrong) for name in SINGLE_SIGNALS}
    gates = {"gate1": judged.before, "gate2": judged.during, "gate3": judged.after}
    # In production, gate 2 cannot escalate answers that end before it runs.
    opened = np.array([has_opening(row) for row in rows])
    asked = judged if judged.during is None else replace(judged, during=np.where(opened, judged.during, 0.0))
    return HeldOutReport(
        rows=len(rows),
        local_score=float(judged.local.mean()),
        cloud_score=float(judged.cloud.mean()),
        wrong_rate=float(wrong.mean()),
        gain_rate=float(judged.gain.mean()),
        gates={name: _gate_report(p, wrong, judged.gain) for name, p in gates.items() if p is not None},
        single_signals=single,
        best_single_signal=max(single, key=lambda name: np.nan_to_num(single[name])),
        kinds=group_reports(judged.judged, rows, [row.domain for row in rows]),
        leave_out=list(left_out),
        routed=[_routed(asked, point.target.value, point.thresholds) for point in points],
    )


def leave_out(
    fitted: FittedGates, material: TrainingData, train: Sequence[GradedRow], test: Sequence[GradedRow], by: Grouping
) -> LeaveOutReport:
    """Fit gate 3 without each group in turn and score the group's test rows.

    A kind is left out alone. A family is left out together with one family of every other kind, which is the harder
    test because less training data remains. `material`: features and labels of the rows `train`.
    """
    gate, features = fitted.routers["cascade"], material.features["cascade"].take(fitted.fitting)
    labels, test_features = material.labels.take(fitted.fitting), featurise(test, "cascade")
    fitted_on = np.array(_groups(train, by))[fitted.fitting]
    groups = np.array(_groups(test, by))
    judged = np.full(len(test), np.nan)
    for held in _left_out_together(test, by):
        rows, kept = np.flatnonzero(np.isin(groups, held)), np.flatnonzero(~np.isin(fitted_on, held))
        judged[rows] = gate.refitted(features.take(kept), labels.take(kept)).score(test_features.take(rows))
    reports = group_reports(judged, test, list(groups))
    counted = [report for report in reports if np.isfinite(report.auroc)]
    return LeaveOutReport(
        by,
        reports,
        float(np.median([report.auroc for report in counted])) if counted else float("nan"),
        float(np.median([report.token_confidence for report in counted])) if counted else float("nan"),
    )


def _groups(rows: Sequence[GradedRow], by: Grouping) -> list[str]:
    return [row.domain if by == "kind" else row.family for row in rows]


def _left_out_together(rows: Sequence[GradedRow], by: Grouping) -> list[list[str]]:
    """Return the groups that each fit leaves out: a single kind, or the i-th family of every kind."""
    if by == "kind":
        return [[kind] for kind in sorted({row.domain for row in rows})]
    families: dict[str, list[str]] = {}
    for kind, family in sorted({(row.domain, row.family) for row in rows}):
        families.setdefault(kind, []).append(family)
    most = max((len(names) for names in families.values()), default=0)
    return [[names[i] for names in families.values() if i < len(names)] for i in range(most)]


def group_reports(judged: Floats, rows: Sequence[GradedRow], groups: Sequence[str]) -> list[GroupReport]:
    """Return one report per group, sorted by name."""
    names, wrong = np.array(groups), is_wrong(rows)
    confidence = single_signal(MEAN_LOGPROB, [view_of(row) for row in rows])
    weak, strong = scores(rows)
    reports: list[GroupReport] = []
    for name in np.unique(names):
        inside = names == name
        has_both_classes = min(int(wrong[inside].sum()), int((~wrong[inside]).sum())) >= _MIN_CLASS_ROWS
        reports.append(
            GroupReport(
                str(name),
                int(inside.sum()),
                float(weak[inside].mean()),
                float(strong[inside].mean()),
                auroc(judged[inside], wrong[inside]) if has_both_classes else float("nan"),
                auroc(confidence[inside], wrong[inside]) if has_both_classes else float("nan"),
            )
        )
    return reports


def _gate_report(p: Floats, wrong: Bools, gain: Bools) -> GateReport:
    return GateReport(
        auroc(p, wrong),
        bootstrap(lambda rows: auroc(p[rows], wrong[rows]), len(p)),
        auroc(p, gain),
        ece(p, gain),
        ECE_BINS,
        reliability(p, gain),
    )


def _routed(rows: CalibrationRows, target: float, thresholds: Thresholds) -> RoutedReport:
    up = escalated(rows, thresholds)
    routed = np.where(up, rows.cloud, rows.local)

    def quality(chosen: NDArray[np.int64]) -> float:
        return float(routed[chosen].sum() / rows.cloud[chosen].sum())

    first = rows.before > thresholds.before
    second = np.zeros_like(first) if rows.during is None else ~first & (rows.during > thresholds.during)
    return RoutedReport(
        target,
        quality(np.arange(len(routed))),
        bootstrap(quality, len(routed)),
        float(routed.mean()),
        float(up.mean()),
        float(first.mean()),
        float(second.mean()),
    )
