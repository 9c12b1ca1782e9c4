"""Sampling tokens of large vocabularies."""

from kernel_compiler import Spec
from updraft.kernels.sampling.launch import TILE
from updraft.kernels.sampling.triton import argmax_kernel, gumbel_max_kernel


def _gumbel_max(dtype: str, *, mask: bool, truncates: bool) -> Spec:
    pointers = {"logits": f"*{dtype}", "temperatures": "*fp64", "seeds": "*i64", "positions": "*i64"}
    pointers |= {"scores": "*fp64", "chosen": "*i32"}
    pointers |= {"mask": "*i32"} if mask else {}
    pointers |= {"thresholds": "*i64"} if truncates else {}
    absent = {name: None for name in ("mask", "thresholds") if name not in pointers}
    return Spec(
        f"gumbel_max-{dtype}-{mask=}-{truncates=}",
        gumbel_max_kernel,
        {**pointers, **dict.fromkeys(("vocabulary", "row_stride", "num_tiles"), "i32")},
        {"HAS_MASK": mask, "TRUNCATES": truncates, "TILE": TILE, **absent},
        (*pointers, "vocabulary", "row_stride"),
        max_registers=96,  # five programs of 128 threads on a multiprocessor; scores are float64
    )


def _argmax(programs: int) -> Spec:
    pointers = {"scores": "*fp64", "tokens": "*i32", "out": "*i64"}
    return Spec(
        f"argmax-{programs}",
        argmax_kernel,
        {**pointers, "num_programs": "i32"},
        {"BLOCK": programs},
        tuple(pointers),
        num_warps=1,
    )


SPECS = [
    _gumbel_max("fp32", mask=False, truncates=False),
    _gumbel_max("fp32", mask=True, truncates=True),
    _gumbel_max("bf16", mask=False, truncates=True),
    _argmax(1),
    _argmax(256),
]
