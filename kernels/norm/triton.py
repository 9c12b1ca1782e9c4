"""RMSNorm in Triton: see `reference` for what is computed. One pass, a row stays in registers."""

# Kernels are typed by Triton, not by Python.
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


def launch_qk_norm(heads: Tensor, num_query_heads: int, query_norm: Norm, key_norm: Norm) -> None:
    tokens, num_heads, size = heads.shape
    if tokens == 0:
        return
    launch = row_launch(size)
    qk_norm_kernel[(triton.cdiv(tokens * num_heads, launch.tiles["ROWS"]),)](
        heads, query_norm.weight, key_norm.weight, tokens, num_heads, num_query_heads, size,
        heads.stride(0), heads.stride(1), query_norm.eps,
        UNIT_OFFSET=query_norm.unit_offset, num_warps=launch.num_warps, **launch.tiles,
    )  # fmt: skip


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


@triton.jit(do_not_specialize=["num_tokens"])
def qk_norm_kernel(
    heads, query_weight, key_weight, num_tokens, num_heads, num_query_heads, size, token_stride, head_stride, eps,
    UNIT_OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row is one head of one token."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    token, head = (rows // num_heads).to(tl.int64), rows % num_heads
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (token < num_tokens) & (columns < size)
    address = heads + token * token_stride + head * head_stride + columns
    values = tl.load(address, inside, 0.0)
    query_weights = tl.load(query_weight + columns, columns < size, 0.0)
    key_weights = tl.load(key_weight + columns, columns < size, 0.0)
    weights = tl.where(head < num_query_heads, query_weights, key_weights)
    tl.store(address, _normed(values, weights, size, eps, UNIT_OFFSET), inside)


@triton.jit
def _normed(values, weights, size, eps, UNIT_OFFSET: tl.constexpr):
    """The norm of each row of `values` (ROWS, BLOCK), zero beyond `size`, in their dtype."""
    wide = values.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / size + eps)
    if UNIT_OFFSET:
        return (normed * (1.0 + weights.to(tl.float32))).to(values.dtype)
    return (normed.to(values.dtype).to(tl.float32) * weights.to(tl.float32)).to(values.dtype)
