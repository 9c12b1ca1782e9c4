"""Turns two trained models into the packaged pair: `python -m updraft.embedded.policy`.

Packs `out/small/model` and `out/large/model` into `embedded/weights/` (GGUF and safetensors), runs both over the
calibration and test splits, fits the routing policy on calibration, evaluates it on test, and writes the model cards.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import msgspec
from rich.console import Console

from ..classifier.graded_row import GradedRow
from ..classifier.grading.graded_data import read_graded, write_graded
from ..classifier.policy.calibration_scope import CalibrationScope
from ..classifier.policy.graph_files import CARD_NAME, sha256
from ..classifier.policy.policy import Policy, Source
from ..classifier.policy.summary import sentences
from ..classifier.target import Target
from ..classifier.training.gates import fit_gates
from ..classifier.training.train import FitRecipe, training_data_of, write_policy
from . import pocket
from .cards import write_cards
from .collect import collect
from .export import write_gguf
from .held_out import HeldOutReport, evaluate, leave_out, policy_probabilities
from .tasks import Split, make_tasks

TARGETS = (0.9, 0.95, 0.97, 0.98, 0.99)


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


def graded(split: Split, n: int, weights: Path, store: Path) -> Path:
    """Return the file in `store` with the pair's graded runs on `n` tasks of `split`; collect the runs if missing."""
    file = store / f"{split}.jsonl"
    if not file.exists():
        rows = collect(make_tasks(split, n), weights / f"{pocket.SMALL}.gguf", weights / pocket.LARGE)
        write_graded(file, rows)
    return file


def fit(calibration: Path, test: list[GradedRow], date: str, folder: Path) -> tuple[Policy, HeldOutReport]:
    """Fit a policy on the graded runs in `calibration`, write it to `folder`, and report on `test`."""
    rows = read_graded(calibration)
    recipe = FitRecipe(
        models={"local": pocket.SMALL, "cloud": pocket.LARGE},
        data=[Source(f"pocket tasks ({calibration.stem})", sha256(calibration.read_bytes()), len(rows))],
        grading="the checks of the task suite",
        date=date,
        calibrated_on=CalibrationScope.of(rows),
    )
    material = training_data_of(rows)
    gates = fit_gates(material, recipe.seed)
    policy = write_policy(gates, material, recipe, folder)
    points = [policy.operating_point(Target("quality", quality)) for quality in TARGETS]
    left_out = [leave_out(gates, material, rows, test, by) for by in ("kind", "family")]
    return policy, evaluate(policy_probabilities(policy, test), test, points, left_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("out"), help="folder with small/model and large/model")
    parser.add_argument("--keep-models", action="store_true", help="use the packed models unchanged")
    parser.add_argument("--weights", type=Path, default=pocket.WEIGHTS, help="folder to write")
    # The kinds have equal shares up to 12,000 tasks; beyond that, small kinds run out of distinct questions.
    parser.add_argument("--calibration", type=int, default=6000, help="number of calibration tasks")
    parser.add_argument("--test", type=int, default=2000, help="number of test tasks")
    parser.add_argument(
        "--outcomes", type=Path, help="folder with calibration.jsonl and test.jsonl (default: out/outcomes)"
    )
    parser.add_argument("--date", default="", help="date to record in the model cards")
    args = parser.parse_args()
    store = args.outcomes or args.models / "outcomes"
    if not args.keep_models:
        pack(args.models / "small" / "model", args.models / "large" / "model", args.weights)
        if args.outcomes is None:
            shutil.rmtree(store, ignore_errors=True)
    calibration = graded("calibration", args.calibration, args.weights, store)
    test = read_graded(graded("test", args.test, args.weights, store))
    folder = args.weights / "policy"
    policy, report = fit(calibration, test, args.date, folder)
    show(policy, report)
    shipped = {"policy_sha256": sha256((folder / CARD_NAME).read_bytes())}
    figures = msgspec.json.format(msgspec.json.encode({**shipped, **msgspec.to_builtins(report)}), indent=1)
    (folder / "report.json").write_bytes(figures + b"\n")
    write_cards(args.weights, test, args.date)


def show(policy: Policy, report: HeldOutReport) -> None:
    """Print the calibration's guarantees and the results on held-out rows."""
    console = Console()
    for line in sentences(policy, Target()):
        console.print(line)
    for name, gate in report.gates.items():
        console.print(f"{name}: AUROC wrong {gate.auroc_wrong:.4f}, gain {gate.auroc_gain:.4f}, ECE {gate.ece:.4f}")
    for left in report.leave_out:
        console.print(f"unseen {left.by}: AUROC {left.median:.3f}, token confidence {left.median_token_confidence:.3f}")
    for routed in report.routed:
        console.print(f"quality {routed.target:g}: {routed.quality:.4f} kept, {routed.cloud_share:.1%} in the cloud")


if __name__ == "__main__":
    main()
