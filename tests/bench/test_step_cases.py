"""The cases of a step's other kernels, in small on the CPU: they run on every set, and no kernel is left out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from updraft import bench
from updraft.bench import step_cases
from updraft.bench.step_cases import (
    edits_case,
    kv_write_case,
    logprobs_case,
    probabilities_case,
    qk_norm_case,
    truncated_case,
)

CASES = [
    (kv_write_case(3, "cpu"), 2 * (3 * 48 * 128 * 2) + 2 * (3 * 64 * 4)),
    (qk_norm_case(3, "cpu"), 2 * (3 * 40 * 128 * 2)),
    (truncated_case(3, 64, "cpu"), 3 * 64 * 4),
    (probabilities_case(3, 64, "cpu"), 2 * 3 * 64 * 4),
    (logprobs_case(3, 64, "cpu"), 3 * 64 * 4),
    (edits_case(3, 80, "cpu"), 3 * 64 * 80),
]


@pytest.mark.parametrize(("case", "bytes_moved"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_cases_run_on_every_set(case, bytes_moved: int) -> None:
    for index in range(case.sets):
        case.run(index)
    assert case.bytes_moved == bytes_moved


def test_all_of_them_are_measured() -> None:
    made = {make.func.__name__ for make in step_cases.step_cases()}
    assert made == {name for name in vars(step_cases) if name.endswith("_case")}


def test_every_kernel_has_a_case() -> None:
    """What a module of kernels offers for a device, some file of cases asks for."""
    folder = Path(bench.__file__).parent
    asked = " ".join(path.read_text() for path in folder.glob("*_cases.py"))
    offered: set[str] = set()
    for path in (folder.parent / "kernels").rglob("*.py"):
        tree = ast.parse(path.read_text())
        offered |= {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and "if uses_triton(" in ast.unparse(node) and node.name[0] != "_"
        }
    assert {"write_kv_", "gated_activation", "rms_norm", "sample", "add_lora"} <= offered
    assert not {name for name in offered - {"thresholds"} if name not in asked}  # `sample` calls that
