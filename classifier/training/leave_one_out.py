"""How good a trained classifier is: ranking, honesty, unseen kinds, and what routing with it would have done.

Everything is measured on rows the gates were not fitted on; the results are dataclasses that serialise to JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array, Bools, Floats
from ..calibration.trace_targets import CalibratedTarget, CascadeRows, Simulation, simulate
from ..evaluation.metrics import ECE_BINS, ReliabilityBin, auroc, bootstrap, ece, reliability
from ..features import vectors as features
from ..features.gate_inputs import RunView
from ..features.vectors import GATES, Gate
from ..grading.outcomes import Outcome
from .experts import FitOptions, FittedGate, TrainingRows

Grouping = Literal["kind", "family"]

MIN_CLASS_ROWS = 5
TOKEN_CONFIDENCE = "mean_logprob"

# Single token signals, each turned so that higher means "more likely wrong".
SINGLE_SIGNALS: dict[str, Callable[[RunView], float]] = {
    TOKEN_CONFIDENCE: lambda v: -_of(v.logprobs, np.mean),
    "sum_logprob": lambda v: -_of(v.logprobs, np.sum),
    "min_logprob": lambda v: -_of(v.logprobs, np.min),
    "q10_logprob": lambda v: -_of(v.logprobs, lambda x: np.quantile(x, 0.1)),
    "first_logprob": lambda v: -_of(v.logprobs, lambda x: x[0]),
    "last_logprob": lambda v: -_of(v.logprobs, lambda x: x[-1]),
    "mean_entropy": lambda v: _of(v.entropies, np.mean),
    "max_entropy": lambda v: _of(v.entropies, np.max),
    "first_entropy": lambda v: _of(v.entropies, lambda x: x[0]),
    "mean_margin": lambda v: -_of(v.margins, np.mean),
    "min_margin": lambda v: -_of(v.margins, np.min),
    "first_margin": lambda v: -_of(v.margins, lambda x: x[0]),
    "prompt_mean_logprob": lambda v: -_of(v.prompt_logprobs, np.mean),
    "prompt_min_logprob": lambda v: -_of(v.prompt_logprobs, np.min),
}


@dataclass(frozen=True, slots=True)
class GateReport:
    """One gate on the test rows. Interval: 95 % bootstrap; `ece` takes `ece_bins` equal-mass bins of P(gain)."""

    auroc_wrong: float
    auroc_wrong_interval: tuple[float, float]
    auroc_gain: float
    ece: float
    ece_bins: int
    reliability: list[ReliabilityBin]


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One kind or family: AUROC for "local is wrong" of gate 3 and of token confidence; NaN with too few of a class."""

    group: str
    rows: int
    local_score: float
    cloud_score: float
    auroc: float
    token_confidence: float


@dataclass(frozen=True, slots=True)
class LeaveOutReport:
    """Gate 3 on the test rows of each group, its experts fitted without that group's training rows."""

    by: str
    groups: list[GroupReport]
    median: float
    median_token_confidence: float


@dataclass(frozen=True, slots=True)
class RoutedReport:
    """The test rows routed at one target. `quality` is the routed over the cloud score, with its 95 % bootstrap."""

    target: float
    quality: float
    quality_interval: tuple[float, float]
    simulation: Simulation


@dataclass(frozen=True, slots=True)
class LeaveOneOutReport:
    """All of it, for one pair of models on one set of test rows."""

    rows: int
    local_score: float
    cloud_score: float
    wrong_rate: float
    gain_rate: float
    gates: dict[Gate, GateReport]
    single_signals: dict[str, float]
    best_single_signal: str
    kinds: list[GroupReport]
    leave_out: list[LeaveOutReport]
    routed: list[RoutedReport]

    def flat(self) -> dict[str, float]:
        """The headline figures under dotted names; what could not be computed is left out."""
        found: dict[str, float] = {
            "rows": self.rows,
            "local_score": self.local_score,
            "cloud_score": self.cloud_score,
            "wrong_rate": self.wrong_rate,
            "gain_rate": self.gain_rate,
            "single_signals.best": self.single_signals[self.best_single_signal],
        }
        for gate, report in self.gates.items():
            found[f"{gate}.auroc_wrong"] = report.auroc_wrong
            found[f"{gate}.auroc_gain"] = report.auroc_gain
            found[f"{gate}.ece"] = report.ece
        found |= {f"single_signals.{name}": value for name, value in self.single_signals.items()}
        for left in self.leave_out:
            found[f"leave_{left.by}_out.median_auroc"] = left.median
            found[f"leave_{left.by}_out.median_token_confidence"] = left.median_token_confidence
            found[f"leave_{left.by}_out.groups"] = sum(np.isfinite(group.auroc) for group in left.groups)
        for routed in self.routed:
            found[f"routed_{routed.target:g}.quality"] = routed.quality
            found[f"routed_{routed.target:g}.accuracy"] = routed.simulation.routed
            found[f"routed_{routed.target:g}.cloud_share"] = routed.simulation.cloud_share
        return {name: float(value) for name, value in found.items() if np.isfinite(value)}


def is_wrong(outcomes: Sequence[Outcome]) -> Bools:
    """(n,) whether the local answer is wrong: a score below one half."""
    return np.array([o.local_score < 0.5 for o in outcomes], np.bool_)


def evaluate(
    probabilities: dict[Gate, Floats],
    outcomes: Sequence[Outcome],
    targets: Sequence[CalibratedTarget],
    leave_out: Sequence[LeaveOutReport] = (),
) -> LeaveOneOutReport:
    """Report on `outcomes` with each gate's P(gain) of them, (n,) each, at the calibrated `targets`."""
    wrong = is_wrong(outcomes)
    gain = np.array([o.gain for o in outcomes], np.bool_)
    cascade = cascade_rows(probabilities, outcomes)
    signals = {name: single_signal(name, outcomes) for name in SINGLE_SIGNALS}
    single = {name: auroc(values, wrong) for name, values in signals.items()}
    return LeaveOneOutReport(
        rows=len(outcomes),
        local_score=float(cascade.local_score.mean()),
        cloud_score=float(cascade.cloud_score.mean()),
        wrong_rate=float(wrong.mean()),
        gain_rate=float(gain.mean()),
        gates={gate: _gate_report(probabilities[gate], wrong, gain) for gate in GATES},
        single_signals=single,
        best_single_signal=max(single, key=lambda name: np.nan_to_num(single[name])),
        kinds=group_reports(probabilities["gate3"], outcomes, [o.kind for o in outcomes]),
        leave_out=list(leave_out),
        routed=[_routed(cascade, target) for target in targets],
    )


def leave_one_out(
    gate3: FittedGate, train: TrainingRows, test: Sequence[Outcome], by: Grouping, options: FitOptions
) -> LeaveOutReport:
    """Fit gate 3 without each group in turn, experts and blend, and score the group's test rows.

    Kinds are left out one by one; families together with one of every other kind, which leaves less to train on: the
    harder test.
    """
    groups = np.array([o.kind if by == "kind" else o.family for o in test])
    fitted_on = train.kinds if by == "kind" else train.families
    test_x = np.stack([features.after(outcome.view) for outcome in test])
    scores = np.full(len(test), np.nan)
    for held in _left_out_together(test, by):
        rows = np.isin(groups, held)
        scores[rows] = gate3.refit_score(train, ~np.isin(fitted_on, held), test_x[rows], options)
    reports = group_reports(scores, test, list(groups))
    counted = [report for report in reports if np.isfinite(report.auroc)]
    return LeaveOutReport(
        by,
        reports,
        float(np.median([report.auroc for report in counted])) if counted else float("nan"),
        float(np.median([report.token_confidence for report in counted])) if counted else float("nan"),
    )


def _left_out_together(outcomes: Sequence[Outcome], by: Grouping) -> list[list[str]]:
    """Which groups one fit leaves out: a single kind, or the i-th family of every kind."""
    if by == "kind":
        return [[kind] for kind in sorted({o.kind for o in outcomes})]
    families: dict[str, list[str]] = {}
    for kind, family in sorted({(o.kind, o.family) for o in outcomes}):
        families.setdefault(kind, []).append(family)
    most = max((len(names) for names in families.values()), default=0)
    return [[names[i] for names in families.values() if i < len(names)] for i in range(most)]


def group_reports(scores: Floats, outcomes: Sequence[Outcome], groups: Sequence[str]) -> list[GroupReport]:
    """One report per group, by name."""
    names, wrong = np.array(groups), is_wrong(outcomes)
    confidence = single_signal(TOKEN_CONFIDENCE, outcomes)
    found: list[GroupReport] = []
    for name in np.unique(names):
        rows = names == name
        enough = min(int(wrong[rows].sum()), int((~wrong[rows]).sum())) >= MIN_CLASS_ROWS
        inside = [outcome for outcome, chosen in zip(outcomes, rows, strict=True) if chosen]
        found.append(
            GroupReport(
                str(name),
                len(inside),
                float(np.mean([o.local_score for o in inside])),
                float(np.mean([o.cloud_score for o in inside])),
                auroc(scores[rows], wrong[rows]) if enough else float("nan"),
                auroc(confidence[rows], wrong[rows]) if enough else float("nan"),
            )
        )
    return found


def cascade_rows(probabilities: dict[Gate, Floats], outcomes: Sequence[Outcome]) -> CascadeRows:
    return CascadeRows(
        before=probabilities["gate1"],
        during=probabilities["gate2"],
        after=probabilities["gate3"],
        local_score=np.array([o.local_score for o in outcomes], np.float64),
        cloud_score=np.array([o.cloud_score for o in outcomes], np.float64),
    )


def single_signal(name: str, outcomes: Sequence[Outcome]) -> Floats:
    """(n,) one entry of SINGLE_SIGNALS; what is missing or infinite counts as extreme."""
    values = np.array([SINGLE_SIGNALS[name](o.view) for o in outcomes], np.float64)
    return np.nan_to_num(values, nan=1e9, posinf=1e9, neginf=-1e9)


def _gate_report(p: Floats, wrong: Bools, gain: Bools) -> GateReport:
    return GateReport(
        auroc(p, wrong),
        bootstrap(lambda rows: auroc(p[rows], wrong[rows]), len(p)),
        auroc(p, gain),
        ece(p, gain),
        ECE_BINS,
        reliability(p, gain),
    )


def _routed(rows: CascadeRows, target: CalibratedTarget) -> RoutedReport:
    def quality(chosen: NDArray[np.int64]) -> float:
        part = CascadeRows(
            rows.before[chosen],
            rows.during[chosen],
            rows.after[chosen],
            rows.local_score[chosen],
            rows.cloud_score[chosen],
        )
        return simulate(part, target.thresholds).quality

    simulation = simulate(rows, target.thresholds)
    return RoutedReport(target.quality, simulation.quality, bootstrap(quality, len(rows.after)), simulation)


def _of(values: Array, reduce: Callable[[Array], Any]) -> float:
    return float(reduce(values)) if len(values) else float("nan")
