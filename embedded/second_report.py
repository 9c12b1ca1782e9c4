"""What second samples do for the pocket pair: `python -m updraft.embedded.second_report --help`.

Both models answer the tasks, the small one twice; a policy is fitted on the calibration tasks in a folder of its own,
and judged on the test tasks with second samples and without. The packaged policy stays as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..classifier.graded import GradedRow
from ..classifier.outcomes import Outcome
from ..classifier.policy import Policy
from ..classifier.second_report import figures
from ..classifier.text_fit import Recipe, fit_text_policy
from ..classifier.text_policy import TextPolicy
from ..classifier.train import TrainOptions, fit
from . import pocket
from .policy import graded


def _by_runs(rows: Sequence[Outcome], folder: Path) -> Policy:
    fit(rows, folder, TrainOptions())
    return Policy.load(folder)


def _by_texts(rows: Sequence[Outcome], folder: Path) -> TextPolicy:
    """Of prompts, answers and grades alone."""
    texts = [
        GradedRow(row.view.prompt.text, row.local_score, row.cloud_score, answer=row.view.answer, second=row.second)
        for row in rows
    ]
    return fit_text_policy(texts, Recipe({"local": pocket.SMALL, "cloud": pocket.LARGE}, [], "task answers"), folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=int, default=6000, help="calibration tasks (default: %(default)s)")
    parser.add_argument("--test", type=int, default=2000, help="test tasks (default: %(default)s)")
    parser.add_argument("--quality", type=float, default=0.98, help="the target (default: %(default)s)")
    parser.add_argument("--texts", action="store_true", help="a policy as of a graded file without token signals")
    parser.add_argument("--out", type=Path, required=True, help="folder for outcomes and the policy")
    given = parser.parse_args()
    rows = graded("calibration", given.calibration, pocket.WEIGHTS, given.out)
    policy = _by_texts(rows, given.out / "texts") if given.texts else _by_runs(rows, given.out / "policy")
    found = figures(policy, graded("test", given.test, pocket.WEIGHTS, given.out), given.quality)
    print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())  # noqa: T201


if __name__ == "__main__":
    main()
