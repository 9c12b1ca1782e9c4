"""Every kernel compiles for sm_80, sm_90 and sm_100 without a GPU, spills nothing and fits in shared memory."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from kernel_compiler import ARCHITECTURES, TENSOR_CORES, Compile, compiler, specs_in

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # such files come first
FILES = sorted((Path(__file__).parent / "specs").glob("*.py"))
KERNELS = Path(__file__).resolve().parents[2] / "kernels"
HOPPER_SHARED, DRIVERS_SHARE = 228 * 1024, 1024  # bytes of a multiprocessor, and what each program there takes besides
PRODUCTS = ("attend_kernel", "expand_kernel", "expert_kernel", "int4_kernel", "byte_kernel", "shrink_kernel")
#: Kernels that by their nature have nothing to multiply, and no tile to copy while another one is multiplied.
WITHOUT_PRODUCTS = {
    "elements of rows, read once": "fp8_tokens_kernel gated_activation_kernel rms_norm_kernel write_kv_kernel",
    "sums of partial results": "merge_kernel reduce_kernel",
    "maxima, sums and counts over logits": "argmax_kernel gumbel_max_kernel kept_mass_kernel radix_histogram_kernel "
    "radix_select_kernel row_stats_kernel row_tops_kernel tile_stats_kernel tile_tops_kernel",
    "single logits": "edit_kernel gather_candidates_kernel",
}
LISTS = [
    *(pytest.param(path, "SPECS", id=path.stem) for path in FILES),
    *(
        pytest.param(path, "SOAK_SPECS", id=f"{path.stem}-soak", marks=[pytest.mark.soak, pytest.mark.timeout(1800)])
        for path in FILES
        if specs_in(path, "SOAK_SPECS")
    ),
]


@pytest.fixture(scope="module")
def compile_list() -> Iterator[Compile]:
    with compiler() as compile_list:
        yield cache(compile_list)


@pytest.mark.timeout(1200)  # nothing is cached on a new machine
@pytest.mark.parametrize(("path", "name"), LISTS)
def test_compiles_and_fits(path: Path, name: str, compile_list: Compile) -> None:
    specs = {spec.name: spec for spec in specs_in(path, name)}
    assert len(specs) == len(specs_in(path, name)), "two specifications have one name"
    rows = compile_list(path, name)
    compiled = {(row.spec, row.architecture) for row in rows}
    assert compiled == {(spec.name, each) for spec in specs.values() for each in ARCHITECTURES if each >= spec.least}
    for row in rows:
        spec = specs[row.spec]
        assert row.spilled <= spec.max_spilled.get(row.architecture, 0), row
        assert row.registers <= spec.max_registers, row
        assert row.shared <= spec.max_shared[row.architecture], row
        assert row.architecture != 90 or spec.programs * (row.shared + DRIVERS_SHARE) <= HOPPER_SHARED, row


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_products_use_tensor_cores_and_copy_ahead(path: Path, compile_list: Compile) -> None:
    """Large tiles use the newest tensor cores of each architecture, small tiles at least the oldest. Copies to shared
    memory are asynchronous on all architectures (`cp.async`), as addresses come from block tables and indices."""
    specs = {spec.name: spec for spec in specs_in(path)}
    for row in compile_list(path, "SPECS"):
        spec = specs[row.spec]
        kernel = spec.kernel.fn.__name__
        if kernel not in PRODUCTS:
            assert not row.tensor_cores and not row.copies_ahead, row
            continue
        if "*fp32" in (spec.signature.get("query"), spec.signature.get("hidden")):
            assert not row.tensor_cores, row  # tensor cores would round float32
        else:
            is_large = any(spec.constexprs.get(rows, 0) >= 64 for rows in ("BLOCK_M", "BLOCK_ROWS", "BLOCK_TOKENS"))
            assert row.tensor_cores == [TENSOR_CORES[row.architecture]] if is_large else row.tensor_cores, row
        assert row.copies_ahead or kernel == "expand_kernel", row  # an expansion reads its inputs once


def launched_kernels(sources: Iterable[str]) -> set[str]:
    """Functions under `triton.jit` that no other one calls: programs begin there."""
    jitted: Mapping[str, ast.FunctionDef] = {
        node.name: node
        for source in sources
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    }
    called = {
        node.func.id
        for function in jitted.values()
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return set(jitted) - called


def test_kernels_are_distinguished_from_helpers() -> None:
    first = "@triton.jit(do_not_specialize=['n'])\ndef outer(n):\n    inner(n)\n\ndef plain():\n    outer[1](2)\n"
    assert launched_kernels([first, "@triton.jit\ndef inner(n): ...\n"]) == {"outer"}


def test_every_kernel_is_specified() -> None:
    specified = {spec.kernel.fn.__name__ for path in FILES for spec in specs_in(path)}
    launched = launched_kernels(path.read_text() for path in KERNELS.rglob("*.py"))
    without_products = " ".join(WITHOUT_PRODUCTS.values()).split()
    assert specified == launched == {*PRODUCTS, *without_products}
    assert len(launched) == len(PRODUCTS) + len(without_products) > 20
