"""Every kernel compiles for sm_80 and sm_90 without a GPU, spills no more than is specified, and fits shared memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernel_compiler import compile_in_child, specs_in

pytest.importorskip("triton")
FILES = sorted((Path(__file__).parent / "specs").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_compiles_and_fits(path: Path) -> None:
    specs = {spec.name: spec for spec in specs_in(path)}
    rows = compile_in_child(path)
    assert {row.spec for row in rows} == set(specs)
    for row in rows:
        spec = specs[row.spec]
        assert row.spilled <= spec.max_spilled.get(row.architecture, 0), row
        assert row.registers <= spec.max_registers, row
        assert row.shared <= spec.max_shared[row.architecture], row


def test_every_kernel_is_specified() -> None:
    kernels = Path(__file__).resolve().parents[2] / "kernels"
    sources = [path.read_text(encoding="utf-8") for path in kernels.glob("*_triton.py")]
    written = {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source, re.MULTILINE)}
    assert len(written) > 20
    assert {spec.kernel.__name__ for path in FILES for spec in specs_in(path)} == written
