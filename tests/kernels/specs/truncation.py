"""The threshold search, by count and by mass, as large vocabularies launch it."""

from kernel_compiler import Spec
from updraft.kernels.sampling import triton_truncation as kernels
from updraft.kernels.sampling.launch import TILE

_ROW = {"temperatures": "*fp64", "state": "*i64", "tops": "*i64"}
_SHAPE = dict.fromkeys(("vocabulary", "row_stride", "num_tiles", "row_tiles"), "i32")


def _step(kernel: str, dtype: str, *, by_mass: bool, mask: bool) -> Spec:
    pointers = {**_ROW, "logits": f"*{dtype}", "sums": "*i64", "amounts": "*fp64" if by_mass else "*i32"}
    pointers |= {"mask": "*i32"} if mask else {}
    pointers |= {"counts": "*i32", "left": "*i64"} if kernel != "radix_histogram" else {}
    integers = dict(_SHAPE)
    if kernel == "radix_histogram":
        integers["done"] = "i32"
    if kernel == "radix_select":
        del integers["num_tiles"]
    return Spec(
        f"{kernel}-{dtype}-{by_mass=}-{mask=}",
        getattr(kernels, f"{kernel}_kernel"),
        {**pointers, **integers},
        {"BY_MASS": by_mass, "HAS_MASK": mask, "TILE": TILE, **({} if mask else {"mask": None})},
        (*pointers, "vocabulary", "row_stride"),
        num_warps=8,
        max_registers=128,  # two programs of 256 threads on a multiprocessor
    )


def _row_stats(tiles: int) -> Spec:
    pointers = {**_ROW, "masses": "*fp32", "top_k": "*i32", "top_p": "*fp64", "min_p": "*fp64"}
    return Spec(
        f"row_stats-{tiles}",
        kernels.row_stats_kernel,
        {**pointers, "vocabulary": "i32", "row_tiles": "i32"},
        {"HAS_TOP_K": True, "HAS_TOP_P": True, "HAS_MIN_P": True, "BLOCK": tiles},
        tuple(pointers),
        num_warps=1,
        max_registers=168,
    )


def _kept_mass() -> Spec:
    pointers = {**_ROW, "logits": "*fp32", "top_k": "*i32"}
    return Spec(
        "kept_mass",
        kernels.kept_mass_kernel,
        {**pointers, **_SHAPE},
        {"HAS_MASK": False, "TILE": TILE, "mask": None},
        (*pointers, "vocabulary", "row_stride"),
        max_registers=64,
    )


SPECS = [
    *(
        _step(kernel, "fp32", by_mass=True, mask=False)
        for kernel in ("radix_histogram", "gather_candidates", "radix_select")
    ),
    *(
        _step(kernel, "bf16", by_mass=False, mask=True)
        for kernel in ("radix_histogram", "gather_candidates", "radix_select")
    ),
    _row_stats(256),
    _kept_mass(),
]
