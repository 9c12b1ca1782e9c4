"""The survey of tiles, for float32 and bfloat16 logits, with and without a grammar's mask."""

from kernel_compiler import Spec
from updraft.kernels.sampling.launch import TILE
from updraft.kernels.sampling.triton_ranks import survey_kernel


def _survey(dtype: str, *, mask: bool) -> Spec:
    pointers = {"logits": f"*{dtype}", "temperatures": "*fp64", "tops": "*i64", "masses": "*fp32"}
    pointers |= {"mask": "*i32"} if mask else {}
    integers = dict.fromkeys(("vocabulary", "row_stride", "num_tiles", "row_tiles"), "i32")
    return Spec(
        f"{dtype}-{mask=}",
        survey_kernel,
        {**pointers, **integers},
        {"HAS_MASK": mask, "TILE": TILE, **({} if mask else {"mask": None})},
        (*pointers, "vocabulary", "row_stride"),
        max_registers=64,  # eight programs of 128 threads on a multiprocessor
    )


SPECS = [_survey("fp32", mask=False), _survey("fp32", mask=True), _survey("bf16", mask=True)]
