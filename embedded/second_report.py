"""What second samples do for the pocket pair: `python -m updraft.embedded.second_report --help`.

Both models answer the tasks, the small one twice; a policy is fitted on the calibration tasks in a folder of its own,
and judged on the test tasks with second samples and without. The packaged policy stays as it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from ..classifier.policy import Policy
from ..classifier.second_report import figures
from ..classifier.train import TrainOptions, fit
from . import pocket
from .policy import graded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=int, default=6000, help="calibration tasks (default: %(default)s)")
    parser.add_argument("--test", type=int, default=2000, help="test tasks (default: %(default)s)")
    parser.add_argument("--quality", type=float, default=0.98, help="the target (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for outcomes and the policy")
    given = parser.parse_args()
    folder = given.out / "policy"
    fit(graded("calibration", given.calibration, pocket.WEIGHTS, given.out), folder, TrainOptions())
    found = figures(Policy.load(folder), graded("test", given.test, pocket.WEIGHTS, given.out), given.quality)
    print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())  # noqa: T201


if __name__ == "__main__":
    main()
