"""The notebooks of `examples/studies` run, and find what they claim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

STUDIES = Path(__file__).parents[3] / "examples" / "studies"


@pytest.mark.parametrize("name", ["batch_size", "continuous_batching", "paged_memory"])
def test_a_study_runs(name: str) -> None:
    notebook = json.loads((STUDIES / f"{name}.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert "assert" in cells[-1]
    figures: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"{name}[{number}]", "exec"), figures)
