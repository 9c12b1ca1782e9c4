"""Edits of float32 logits."""

from kernel_compiler import Spec
from updraft.kernels.sampling.triton_logit_edits import edit_kernel

_POINTERS = {"logits": "*fp32", "rows": "*i32", "token_ids": "*i32", "divisors": "*fp32", "offsets": "*fp32"}
SPECS = [
    Spec(
        "edit",
        edit_kernel,
        {**_POINTERS, "number": "i32", "row_stride": "i32"},
        {"BLOCK": 256},
        (*_POINTERS, "row_stride"),
        max_registers=64,
    )
]
