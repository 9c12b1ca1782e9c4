"""Large tensors come from the heap, which stays with a process that asks for it, and not from mappings of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys, torch
from updraft.kernels.runtime.host_memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)
large = torch.empty(2**22)
address = large.data_ptr()
del large
for line in open("/proc/self/maps"):
    start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
    if start <= address < end:
        print(line.split()[-1])
"""


def where_it_was(mode: str) -> str:
    """The mapping that a large tensor was in, after it is freed."""
    command = [sys.executable, "-c", PROGRAM, mode]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / ".typing")}, check=False
    )
    if done.returncode == 3:
        pytest.skip("not glibc")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_large_blocks_stay_in_the_heap() -> None:
    assert where_it_was("leave") != "[heap]"
    assert where_it_was("keep") == "[heap]"
