"""Turns two trained models into what ships: `python -m updraft.embedded.policy`.

Packs `out/small/model` and `out/large/model` into `embedded/weights/` (GGUF and safetensors), runs both over the
calibration and test splits, trains the routing policy on the one, measures everything on the other, writes the cards.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from ..classifier.arrays import Floats
from ..classifier.calibration.rows import CALIBRATION_NAME, CalibrationRows, pack_calibration
from ..classifier.features.gate_inputs import PromptView
from ..classifier.features.vectors import Gate
from ..classifier.grading import outcomes
from ..classifier.grading.outcomes import Outcome
from ..classifier.policy.trace_policy import CARD_NAME, Policy, sha256
from ..classifier.training.tables import show_card, show_report
from ..classifier.training.train_trace import EXPORT_TOLERANCE, Trained, TrainOptions, calibration_of, fit, measure
from . import pocket
from .cards import write_cards
from .collect import collect
from .export import write_gguf
from .tasks import Split, make_tasks


def pack(small: Path, large: Path, weights: Path) -> None:
    """Copy both model folders into `weights` and convert the small one to GGUF (Q8_0)."""
    for source, name in ((small, pocket.SMALL), (large, pocket.LARGE)):
        target = weights / name
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(source, target)
        report = source.parent / "report.json"
        if report.exists():
            shutil.copy(report, target / "training.json")
    write_gguf(weights / pocket.SMALL, weights / f"{pocket.SMALL}.gguf", "Q8_0")


def graded(split: Split, n: int, weights: Path, store: Path) -> list[Outcome]:
    """Outcomes of the packed pair on `n` tasks of `split`, kept in `store` for a second run."""
    file = store / f"{split}.npz"
    if not file.exists():
        store.mkdir(parents=True, exist_ok=True)
        tasks = make_tasks(split, n)
        outcomes.save(collect(tasks, weights / f"{pocket.SMALL}.gguf", weights / pocket.LARGE, split), file)
    return outcomes.load(file)


def shipped_probabilities(policy: Policy, rows: Sequence[Outcome]) -> dict[Gate, Floats]:
    """P(gain) of `rows`, (n,) per gate, by the exported graphs, one row at a time as in use."""
    return {
        "gate1": np.array([policy.before(row.view.prompt) for row in rows]),
        "gate2": np.array([policy.during(row.view) for row in rows]),
        "gate3": np.array([policy.after(row.view) for row in rows]),
    }


def export_gap(trained: Trained, policy: Policy, rows: Sequence[Outcome]) -> float:
    """The largest difference between the exported and the Python P(gain). Raises RuntimeError if it matters."""
    ours, theirs = trained.probabilities(rows), shipped_probabilities(policy, rows)
    gap = max(float(np.abs(ours[gate] - theirs[gate]).max()) for gate in ours)
    if gap > EXPORT_TOLERANCE:
        raise RuntimeError(f"the exported gates differ from their Python models by {gap:.1e} on the test rows")
    return gap


def recalibrate(weights: Path, n: int) -> None:
    """Put rows of `n` fresh tasks, less those that the gates were trained on, behind the packed policy's limits."""
    folder = weights / "policy"
    policy = Policy.load(folder)
    known = {task.prompt for task in make_tasks("calibration", policy.card.trained_on.rows)}
    tasks = [task for task in make_tasks("calibration", n, seed=1) if task.prompt not in known]
    rows = collect(tasks, weights / f"{pocket.SMALL}.gguf", weights / pocket.LARGE, "calibration")
    calibration = calibration_of(shipped_probabilities(policy, rows), rows)
    put_calibration(replace(calibration, asked=usual_requests(policy, n)), policy, folder)


def usual_requests(policy: Policy, n: int) -> Floats:
    """(n,) gate 1's P(gain) of fresh tasks, all of them: what drift is told by must hold the kinds as use does."""
    return np.array([policy.before(PromptView(task.prompt)) for task in make_tasks("calibration", n, seed=1)])


def put_calibration(calibration: CalibrationRows, policy: Policy, folder: Path) -> None:
    """Write the rows into `folder`, whose policy it is, and name them in its card and report."""
    packed = pack_calibration(calibration)
    (folder / CALIBRATION_NAME).write_bytes(packed)
    card = replace(policy.card, files=policy.card.files | {CALIBRATION_NAME: sha256(packed)})
    (folder / CARD_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n")
    report = msgspec.json.decode((folder / "report.json").read_bytes())
    report["policy_sha256"] = sha256((folder / CARD_NAME).read_bytes())
    (folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("out"), help="folder with small/model and large/model")
    parser.add_argument("--keep-models", action="store_true", help="use the packed models as they are")
    parser.add_argument("--weights", type=Path, default=pocket.WEIGHTS, help="folder to write")
    # More would exhaust the smallest kinds, and calibration would no longer weigh the kinds as use does.
    parser.add_argument("--calibration", type=int, default=6000, help="calibration tasks")
    parser.add_argument("--test", type=int, default=2000, help="test tasks")
    parser.add_argument("--date", default="", help="date to record in the cards")
    parser.add_argument("--recalibrate", type=int, metavar="N", help="only draw new calibration rows: of N fresh tasks")
    args = parser.parse_args()
    if args.recalibrate is not None:
        recalibrate(args.weights, args.recalibrate)
        return
    store = args.models / "outcomes"
    if not args.keep_models:
        pack(args.models / "small" / "model", args.models / "large" / "model", args.weights)
        shutil.rmtree(store, ignore_errors=True)
    calibration = graded("calibration", args.calibration, args.weights, store)
    test = graded("test", args.test, args.weights, store)
    trained = fit(calibration, args.weights / "policy", TrainOptions(date=args.date))
    show_card(trained.card)
    report = measure(trained, test)
    show_report(report)
    policy = Policy.load(args.weights / "policy")
    gap = export_gap(trained, policy, test)
    shipped = {"policy_sha256": sha256((args.weights / "policy" / CARD_NAME).read_bytes()), "export_gap": gap}
    figures = msgspec.json.format(msgspec.json.encode({**shipped, **msgspec.to_builtins(report)}), indent=1)
    (args.weights / "policy" / "report.json").write_bytes(figures + b"\n")
    write_cards(args.weights, test, args.date)


if __name__ == "__main__":
    main()
