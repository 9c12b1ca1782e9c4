"""The statistics of tiles, for float32 and bfloat16 logits, with and without a grammar's mask."""

from kernel_compiler import Spec
from updraft.kernels.sampling.launch import TILE
from updraft.kernels.sampling.triton_ranks import tile_stats_kernel


def _tile_stats(dtype: str, *, mask: bool) -> Spec:
    pointers = {"logits": f"*{dtype}", "temperatures": "*fp64", "tops": "*i64", "masses": "*fp32"}
    pointers |= {"mask": "*i32"} if mask else {}
    integers = dict.fromkeys(("vocabulary", "row_stride", "num_tiles", "row_tiles"), "i32")
    return Spec(
        f"{dtype}-{mask=}",
        tile_stats_kernel,
        {**pointers, **integers},
        {"HAS_MASK": mask, "TILE": TILE, **({} if mask else {"mask": None})},
        (*pointers, "vocabulary", "row_stride"),
        max_registers=64,  # eight programs of 128 threads on a multiprocessor
    )


SPECS = [_tile_stats("fp32", mask=False), _tile_stats("fp32", mask=True), _tile_stats("bf16", mask=True)]
