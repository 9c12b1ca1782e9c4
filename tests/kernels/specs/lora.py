"""Adapters as they are launched: small and large ranks, decoding's tiles and prompts'."""

from __future__ import annotations

from kernel_compiler import Spec
from updraft.kernels.lora.triton import _BLOCK_FEATURES, block_inputs, expand_kernel, shrink_kernel

INDICES = {"rows": "*i32", "tiles": "*i32"}


def shrink(dtype: str, rank: int, rows: int) -> Spec:
    counts = dict.fromkeys(("num_inputs", "num_places", "hidden_stride", "split_steps"), "i32")
    return Spec(
        name=f"shrink-{dtype[1:]}-{rank}-{rows}",
        kernel=shrink_kernel,
        signature={"hidden": dtype, "down": dtype, "low": "*fp32", **INDICES, **counts},
        constexprs={"RANK": rank, "BLOCK_ROWS": rows, "BLOCK_INPUTS": block_inputs(rank)},
        aligned=("hidden", "down", "low", "rows", "tiles", "num_inputs", "hidden_stride"),
        num_stages=4,
        max_registers=80 if rows == 16 else 224,
    )


def expand(dtype: str, rank: int, rows: int) -> Spec:
    counts = dict.fromkeys(("num_features", "num_places", "out_stride", "num_splits"), "i32")
    return Spec(
        name=f"expand-{dtype[1:]}-{rank}-{rows}",
        kernel=expand_kernel,
        signature={"low": "*fp32", "up": dtype, "out": dtype, **INDICES, **counts},
        constexprs={"RANK": rank, "BLOCK_ROWS": rows, "BLOCK_FEATURES": _BLOCK_FEATURES},
        aligned=("low", "up", "out", "rows", "tiles", "num_features", "out_stride"),
        max_registers=64 if rows == 16 else 144,
    )


SHAPES = (("*bf16", 16, 16), ("*fp16", 16, 16), ("*bf16", 64, 16), ("*bf16", 128, 64))
SPECS = [make(*shape) for make in (shrink, expand) for shape in SHAPES]
