"""`make gpu`: the tests that need a CUDA device, then the engine's and the kernels' measurements, from a checkout.

Each runs whatever becomes of the others, in ten minutes together, for no GPU is borrowed longer. The table comes last.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/kernels/gpu", "tests/cloud_engine/gpu")
ENGINE = ("--shape", "qwen3-0.6b", "--device", "cuda", "--requests", "256", "--peers", "none", "--no-speculation")
_TEST_SECONDS = 250
_ENGINE_SECONDS = 130
_KERNEL_SECONDS = 200


def main(arguments: Sequence[str]) -> int:
    """`arguments` go to pytest. 0 if all succeeded."""
    tests = _run(["pytest", "-m", "gpu", "-q", *TESTS, *arguments], _TEST_SECONDS)
    engine = _run(["updraft", "bench", "engine", *ENGINE, "--json", "bench/results/engine.json"], _ENGINE_SECONDS)
    kernels = _run(["updraft", "bench", "kernels", "--short", "--results", "bench/results"], _KERNEL_SECONDS)
    return int(any((tests, engine, kernels)))


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
