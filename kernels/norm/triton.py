"""RMSNorm in Triton, equal to `reference`: one pass that keeps a row in registers."""

# Pyright cannot check the types inside Triton kernels.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.launch import row_launch
from .types import Norm


def launch_rms_norm(hidden: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
    rows, size = hidden.shape
    out = torch.empty((rows, size), dtype=hidden.dtype, device=hidden.device)
    if rows == 0:
        return out
    launch = row_launch(size)
    rms_norm_kernel[(triton.cdiv(rows, launch.tiles["ROWS"]),)](
        hidden, residual, norm.weight, out, rows, size,
        hidden.stride(0), 0 if residual is None else residual.stride(0), norm.eps,
        HAS_RESIDUAL=residual is not None, UNIT_OFFSET=norm.unit_offset,
        num_warps=launch.num_warps, **launch.tiles,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    hidden, residual, weight, out, num_rows, size, hidden_stride, residual_stride, eps,
    HAS_RESIDUAL: tl.constexpr, UNIT_OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows) & (columns < size)
    values = tl.load(hidden + rows * hidden_stride + columns, inside, 0.0)
    if HAS_RESIDUAL:
        address = residual + rows * residual_stride + columns
        values = (values.to(tl.float32) + tl.load(address, inside, 0.0).to(tl.float32)).to(values.dtype)
        tl.store(address, values, inside)
    weights = tl.load(weight + columns, columns < size, 0.0)
    tl.store(out + rows * size + columns, _normed(values, weights, size, eps, UNIT_OFFSET), inside)


@triton.jit
def _normed(values, weights, size, eps, UNIT_OFFSET: tl.constexpr):
    """Return the normalised rows of `values` (ROWS, BLOCK) in the same dtype. Elements beyond `size` must be zero."""
    wide = values.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / size + eps)
    if UNIT_OFFSET:
        return (normed * (1.0 + weights.to(tl.float32))).to(values.dtype)
    return (normed.to(values.dtype).to(tl.float32) * weights.to(tl.float32)).to(values.dtype)
