"""Edits of single logits in Triton, equal to `reference`, with one thread per edit."""

# Pyright cannot check the types inside Triton kernels.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .types import FlatEdits

_BLOCK = 256


def launch_edits(logits: Tensor, edits: FlatEdits) -> None:
    number = len(edits.rows)
    if number:
        edit_kernel[(triton.cdiv(number, _BLOCK),)](
            logits, edits.rows, edits.token_ids, edits.divisors, edits.offsets, number, logits.stride(0),
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["number"])
def edit_kernel(logits, rows, token_ids, divisors, offsets, number, row_stride, BLOCK: tl.constexpr):
    edits = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + edits, edits < number, -1).to(tl.int64)
    real = row >= 0
    address = logits + row * row_stride + tl.load(token_ids + edits, real, 0)
    value, divisor = tl.load(address, real, 0.0), tl.load(divisors + edits, real, 1.0)
    changed = tl.where(value > 0, tl.div_rn(value, divisor), value * divisor)  # div_rn rounds as CPUs do
    tl.store(address, changed + tl.load(offsets + edits, real, 0.0), real)
