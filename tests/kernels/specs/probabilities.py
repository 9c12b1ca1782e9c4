"""Reported log-probabilities of a vocabulary of 152 thousand tokens."""

from kernel_compiler import Spec
from updraft.kernels.sampling import triton_probabilities as kernels
from updraft.kernels.sampling.launch import TILE

_TILES = 256  # the power of two that holds the tiles of the vocabulary


def _tile_tops(dtype: str) -> Spec:
    pointers = {"logits": f"*{dtype}", "tops": "*i64", "masses": "*fp32"}
    return Spec(
        f"tile_tops-{dtype}",
        kernels.tile_tops_kernel,
        {**pointers, "vocabulary": "i32", "row_stride": "i32", "most": "i32"},
        {"TILE": TILE},
        (*pointers, "vocabulary", "row_stride"),
        max_registers=64,
    )


def _row_tops(most: int) -> Spec:
    pointers = {"logits": "*fp32", "chosen": "*i64", "tops": "*i64", "masses": "*fp32"}
    pointers |= {"picked": "*fp32", "values": "*fp32", "ids": "*i64"}
    return Spec(
        f"row_tops-{most}",
        kernels.row_tops_kernel,
        {**pointers, **dict.fromkeys(("row_stride", "num_tiles", "most", "num_top"), "i32")},
        {"TILES": _TILES, "BLOCK": _TILES * most},
        (*pointers, "row_stride"),
        num_warps=8,
        max_registers=128,
    )


SPECS = [
    _tile_tops("fp32"),
    _tile_tops("bf16"),
    _row_tops(1),
    _row_tops(32),
]
