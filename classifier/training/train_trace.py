"""Train a policy from graded outcomes: features, three gates, thresholds, export, and a check that the export agrees.

`python -m updraft.classifier.training.train_trace --outcomes cal.npz --test test.npz --out DIR --json metrics.json`
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from ...protocol.errors import ConfigurationError, UpdraftError
from ..arrays import Array, Floats
from ..calibration.rows import CALIBRATION_NAME, CalibrationRows, pack_calibration
from ..calibration.trace_targets import CONFIDENCE, TARGETS, choose_thresholds
from ..features import vectors as features
from ..features.vectors import FEATURE_VERSION, GATES, FeatureLayout, Gate
from ..grading.outcomes import Outcome, load
from ..optional import load_module, load_onnxruntime
from ..policy.calibrated_on import CalibratedOn
from ..policy.trace_policy import CARD_NAME, FORMAT_VERSION, PolicyCard, TrainedOn, sha256
from .experts import FitOptions, FittedGate, TrainingRows, fit_gate
from .leave_one_out import Grouping, LeaveOneOutReport, cascade_rows, evaluate, leave_one_out

__all__ = ["Outcome", "TrainOptions", "Trained", "fit", "measure", "rows_of"]

EXPORT_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """`local_model` and `cloud_model` name the pair; `date` is recorded as given; a seed gives the same files."""

    local_model: str = "pocket-small"
    cloud_model: str = "pocket-large"
    date: str = ""
    seed: int = 0
    trees: int = 150
    gate2_tokens: int = 8
    targets: tuple[float, ...] = TARGETS
    confidence: float = CONFIDENCE


@dataclass(frozen=True, slots=True)
class Trained:
    """A policy just written: its card, the Python models behind the graphs, and the rows they were fitted on."""

    card: PolicyCard
    gates: dict[Gate, FittedGate]
    rows: dict[Gate, TrainingRows]
    fit_options: FitOptions

    def probabilities(self, outcomes: Sequence[Outcome]) -> dict[Gate, Floats]:
        """P(gain) of other outcomes by the Python models, (n,) per gate."""
        tokens = self.card.gate2_tokens
        return {gate: self.gates[gate].model.probability(rows_of(gate, outcomes, tokens).x) for gate in GATES}


def fit(records: Sequence[Outcome], out: Path, options: TrainOptions | None = None) -> Trained:
    """Train on `records` and write the policy folder `out` (policy.json and one graph per gate).

    Raises ConfigurationError if the records cannot train a policy, RuntimeError if a graph disagrees with its model.
    """
    options = options or TrainOptions()
    hidden_size = _hidden_size(records)
    gates: dict[Gate, FittedGate] = {}
    rows: dict[Gate, TrainingRows] = {}
    files: dict[str, str] = {}
    out.mkdir(parents=True, exist_ok=True)
    for gate in GATES:
        rows[gate] = rows_of(gate, records, options.gate2_tokens)
        try:
            gates[gate] = fit_gate(
                FeatureLayout(gate, hidden_size), rows[gate], FitOptions(options.seed, options.trees)
            )
        except ValueError as error:
            raise ConfigurationError(f"These outcomes cannot train a policy: {error}.") from error
        graph = _exported(gates[gate], rows[gate].x)
        (out / f"{gate}.onnx").write_bytes(graph)
        files[gate] = sha256(graph)
    crossed: dict[Gate, Floats] = {gate: gates[gate].probability for gate in GATES}
    calibration = pack_calibration(calibration_of(crossed, records))
    (out / CALIBRATION_NAME).write_bytes(calibration)
    files[CALIBRATION_NAME] = sha256(calibration)
    cascade = cascade_rows(crossed, records)
    targets = choose_thresholds(cascade, options.targets, confidence=options.confidence)
    card = PolicyCard(
        format_version=FORMAT_VERSION,
        feature_version=FEATURE_VERSION,
        models={"local": options.local_model, "cloud": options.cloud_model},
        hidden_size=hidden_size,
        gate2_tokens=options.gate2_tokens,
        trained_on=_trained_on(records, options),
        thresholds=targets,
        files=files,
        metrics={
            f"cross_validated.{gate}.{name}": value
            for gate in GATES
            for name, value in (
                ("auroc_gain", gates[gate].auroc),
                ("auroc_gain_unseen_kinds", gates[gate].auroc_unseen_kinds),
            )
        },
        calibrated_on=CalibratedOn.of([record.view.prompt.text for record in records]),
    )
    _write_card(card, out)
    return Trained(card, gates, rows, FitOptions(options.seed, options.trees))


def calibration_of(p_gain: dict[Gate, Floats], records: Sequence[Outcome]) -> CalibrationRows:
    """The rows behind a policy's limits. `p_gain`: (n,) each, by gates that did not see the records.

    What the cloud reads and writes is taken to be what the local model did.
    """
    rows = cascade_rows(p_gain, records)
    return CalibrationRows(
        before=rows.before,
        during=rows.during,
        after=rows.after,
        local=rows.local_score,
        cloud=rows.cloud_score,
        read=np.array([len(record.view.prompt_logprobs) for record in records], np.float64),
        written=np.array([len(record.view.logprobs) for record in records], np.float64),
    )


def measure(
    trained: Trained, test: Sequence[Outcome], leave_out: Sequence[Grouping] = ("kind", "family")
) -> LeaveOneOutReport:
    """Evaluate on `test`; for each entry of `leave_out` also with every such group left out of training."""
    gate3 = trained.gates["gate3"]
    lefts = [leave_one_out(gate3, trained.rows["gate3"], test, by, trained.fit_options) for by in leave_out]
    return evaluate(trained.probabilities(test), test, trained.card.thresholds, lefts)


def rows_of(gate: Gate, outcomes: Sequence[Outcome], gate2_tokens: int) -> TrainingRows:
    """The training rows of one gate."""
    featurise: dict[Gate, Callable[[Outcome], Array]] = {
        "gate1": lambda o: features.before(o.view.prompt),
        "gate2": lambda o: features.during(o.view, gate2_tokens),
        "gate3": lambda o: features.after(o.view),
    }
    x = np.stack([featurise[gate](outcome) for outcome in outcomes])
    gain = np.array([o.gain for o in outcomes], np.bool_)
    return TrainingRows(x, gain, np.array([o.kind for o in outcomes]), np.array([o.family for o in outcomes]))


def _hidden_size(records: Sequence[Outcome]) -> int:
    sizes = {len(record.view.prompt_hidden) for record in records}
    sizes |= {len(record.view.answer_hidden) for record in records if record.view.answer_hidden is not None}
    if len(sizes) != 1:
        raise ConfigurationError(
            f"All outcomes must come from one local model: hidden states of {sorted(sizes) or 'no'} sizes were found."
        )
    return sizes.pop()


def _exported(fitted: FittedGate, x: Array) -> bytes:
    """The graph of a gate, checked against the Python model on every row of `x`."""
    load_module("onnx", "train")
    from .export_trace import INPUT, to_onnx

    graph = to_onnx(fitted.model)
    session = load_onnxruntime().InferenceSession(graph, providers=["CPUExecutionProvider"])
    gap = float(np.abs(session.run(None, {INPUT: x})[0] - fitted.model.probability(x)).max())
    if gap > EXPORT_TOLERANCE:
        raise RuntimeError(f"the exported {fitted.model.layout.gate} differs from its Python model by {gap:.1e}")
    return graph


def _trained_on(records: Sequence[Outcome], options: TrainOptions) -> TrainedOn:
    return TrainedOn(
        rows=len(records),
        kinds=len({record.kind for record in records}),
        local_score=float(np.mean([record.local_score for record in records])),
        cloud_score=float(np.mean([record.cloud_score for record in records])),
        gain_rate=float(np.mean([record.gain for record in records])),
        date=options.date,
        seed=options.seed,
    )


def _write_card(card: PolicyCard, out: Path) -> None:
    (out / CARD_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m updraft.classifier.training.train_trace", description=__doc__)
    parser.add_argument("--outcomes", type=Path, required=True, help="outcomes to train on (.npz)")
    parser.add_argument("--test", type=Path, help="held-out outcomes to evaluate on (.npz)")
    parser.add_argument("--out", type=Path, required=True, help="policy folder to write")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--local", default="pocket-small", help="name of the local model (default: %(default)s)")
    parser.add_argument("--cloud", default="pocket-large", help="name of the cloud model (default: %(default)s)")
    parser.add_argument("--date", default="", help="date to record in the policy")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same files (default: %(default)s)")
    parser.add_argument("--trees", type=int, default=150, help="size of each tree ensemble (default: %(default)s)")
    parser.add_argument("--gate2-tokens", type=int, default=8, help="tokens gate 2 waits for (default: %(default)s)")
    parser.add_argument(
        "--leave-out",
        nargs="*",
        choices=("kind", "family"),
        default=["kind", "family"],
        help="groupings to leave out in turn",
    )
    given = parser.parse_args(arguments)
    options = TrainOptions(given.local, given.cloud, given.date, given.seed, given.trees, given.gate2_tokens)
    try:
        _run(given, options)
    except UpdraftError as error:
        parser.exit(2, f"error: {error.message}\n")
    return 0


def _run(given: argparse.Namespace, options: TrainOptions) -> None:
    from .tables import show_card, show_report

    records = load(given.outcomes)
    test = load(given.test) if given.test else []
    shared = {o.view.prompt.text for o in records} & {o.view.prompt.text for o in test}
    if shared:
        raise ConfigurationError(f"{len(shared)} prompts are in both files: a test must hold questions not trained on.")
    trained = fit(records, given.out, options)
    show_card(trained.card)
    figures: dict[str, object] = {"config": options, "metrics": trained.card.metrics}
    if test:
        report = measure(trained, test, given.leave_out)
        card = replace(trained.card, metrics=trained.card.metrics | report.flat())
        _write_card(card, given.out)
        show_report(report)
        figures = {"config": options, "metrics": card.metrics, "report": report}
    if given.json:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")


if __name__ == "__main__":
    raise SystemExit(main())
