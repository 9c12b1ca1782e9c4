"""Experts in Triton, equal to `reference`: one launch multiplies the rows of all experts (grouped GEMM).

As in `linear.triton`, the weights are the left operand, because an expert often has few rows.
"""

# Pyright cannot check the types inside Triton kernels.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..runtime.numeric import cdiv, next_power_of_2
from .launch import expert_launch, num_tiles
from .types import ExpertGroups


def expert_linear_triton(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, groups: ExpertGroups, rows: Tensor | None
) -> Tensor:
    """Multiply row rows[pair] of `hidden`, or row `pair` without `rows`, with the weight of the pair's expert.

    Returns (pairs, features). Rows of pairs that belong to other ranks get no values. Reads nothing back from the
    device, so a CUDA graph can capture the launch.
    """
    experts, features, inputs = weight.shape
    pairs = len(groups.rows)
    out = hidden.new_empty(pairs, features)
    if not pairs:
        return out
    launch = expert_launch(pairs, experts, inputs, hidden.element_size())
    grid = (num_tiles(pairs, experts, launch), cdiv(features, launch.tiles["BLOCK_FEATURES"]))
    expert_kernel[grid](
        hidden, weight, weight if bias is None else bias, out, groups.rows if rows is None else rows, groups.starts,
        experts, features, inputs, hidden.stride(0),
        GATHERED=rows is not None, HAS_BIAS=bias is not None, EVEN=inputs % launch.tiles["BLOCK_INPUTS"] == 0,
        EXPERTS=next_power_of_2(experts),
        num_warps=launch.num_warps, num_stages=launch.num_stages, **launch.tiles,
    )  # fmt: skip
    return out


@triton.jit
def expert_kernel(
    hidden, weight, bias, out, rows, starts, num_experts, num_features, num_inputs, row_stride,
    GATHERED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of features and pairs of one expert. Grid: tiles of pairs over all experts, features."""
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    first = tl.load(starts + experts, mask=experts < num_experts, other=0).to(tl.int32)
    last = tl.load(starts + experts + 1, mask=experts < num_experts, other=0).to(tl.int32)
    tiles = (last - first + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert >= num_experts:  # there are fewer tiles than planned
        return
    before = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    end = tl.load(starts + expert + 1)
    pairs = tl.load(starts + expert) + (tile - before) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    # As in `linear.triton`, programs at the border read the last row again.
    source = tl.minimum(pairs, end - 1)
    if GATHERED:
        source = tl.load(rows + source)
    features = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    row = expert.to(tl.int64) * num_features + tl.minimum(features, num_features - 1)
    inputs = tl.arange(0, BLOCK_INPUTS)
    weights = weight + row[:, None] * num_inputs + inputs[None, :]
    activations = hidden + source[None, :] * row_stride + inputs[:, None]
    total = tl.zeros((BLOCK_FEATURES, BLOCK_TOKENS), tl.float32)
    for start in range(0, num_inputs, BLOCK_INPUTS):
        if EVEN:
            numbers, values = tl.load(weights), tl.load(activations)
        else:
            inside = start + inputs < num_inputs
            numbers = tl.load(weights, mask=inside[None, :], other=0.0)
            values = tl.load(activations, mask=inside[:, None], other=0.0)
        total = tl.dot(numbers, values, total, input_precision="ieee")
        weights += BLOCK_INPUTS
        activations += BLOCK_INPUTS
    if HAS_BIAS:
        total += tl.load(bias + row)[:, None].to(tl.float32)
    places = out + pairs[None, :] * num_features + features[:, None]
    tl.store(places, total.to(out.dtype.element_ty), mask=(features < num_features)[:, None] & (pairs < end)[None, :])
