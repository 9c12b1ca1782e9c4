"""`make gpu`: the tests that need a CUDA device, then the kernels' measurements, in one call from a checkout.

Both run whatever becomes of the other, within the ten minutes that a borrowed GPU may be had for; the table comes last.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/kernels/gpu", "tests/cloud_engine/gpu")
_TEST_SECONDS = 330
_BENCH_SECONDS = 240


def main(arguments: Sequence[str]) -> int:
    """`arguments` go to pytest. 0 if both succeeded."""
    tests = _run(["pytest", "-m", "gpu", "-q", *TESTS, *arguments], _TEST_SECONDS)
    bench = _run(["updraft", "bench", "kernels", "--short", "--results", "bench/results"], _BENCH_SECONDS)
    return int(tests != 0 or bench != 0)


def _run(module: Sequence[str], seconds: int) -> int:
    """`python -m` of these words, in the root of the checkout, where `updraft` is a link in `.typing`."""
    paths = filter(None, [str(ROOT / ".typing"), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        return subprocess.run(
            [sys.executable, "-m", *module], cwd=ROOT, env=environment, timeout=seconds, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"{module[0]} was stopped after {seconds} s\n")
        return 124


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
