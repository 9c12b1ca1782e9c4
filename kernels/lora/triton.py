"""Low-rank adapters in Triton, equal to `reference`: `shrink` to the rank, then `expand` to the features.

With few rows, only the sum over the inputs can be split: `shrink` computes parts, `expand` adds them in fixed order.
"""

# Pyright cannot check the types inside Triton kernels.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .types import LoraPlan, LoraWeights

_BLOCK_FEATURES = 64
#: Maximum number of partial sums. With more, `expand` would lose more time to reading than `shrink` would save.
_MAX_SPLITS = 8
_MIN_STEPS = 4
_ENOUGH_PROGRAMS = 512


def add_lora_triton(out: Tensor, hidden: Tensor, weights: LoraWeights, plan: LoraPlan) -> None:
    """Compute `add_lora_reference` for the rows last assigned to the plan."""
    _, rank, inputs = weights.down.shape
    features = weights.up.shape[1]
    tiles = len(plan.tiles)
    block = block_inputs(rank)
    steps = triton.cdiv(inputs, block)
    splits = max(1, min(_MAX_SPLITS, steps // _MIN_STEPS, _ENOUGH_PROGRAMS // tiles))
    low = torch.empty(splits, len(plan.rows), rank, dtype=torch.float32, device=hidden.device)
    shrink_kernel[(tiles, splits)](
        hidden, weights.down, low, plan.rows, plan.tiles, inputs, len(plan.rows), hidden.stride(0),
        triton.cdiv(steps, splits), RANK=rank, BLOCK_ROWS=plan.tile_rows, BLOCK_INPUTS=block,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    expand_kernel[(tiles, triton.cdiv(features, _BLOCK_FEATURES))](
        low, weights.up, out, plan.rows, plan.tiles, features, len(plan.rows), out.stride(0), splits,
        RANK=rank, BLOCK_ROWS=plan.tile_rows, BLOCK_FEATURES=_BLOCK_FEATURES, num_warps=4, num_stages=2,
    )  # fmt: skip


def block_inputs(rank: int) -> int:
    """Return the number of inputs per step of `shrink`, so that all ranks have about the same bytes in flight."""
    return 128 if rank <= 32 else 64


@triton.jit
def shrink_kernel(
    hidden, down, low, rows, tiles, num_inputs, num_places, hidden_stride, split_steps,
    RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of rows by its adapter's matrix `down`. Each program sums over one split of the inputs.

    Writes to `low` (splits, places, rank). A place is a row's position after sorting by adapter.
    """
    start, end, adapter = _tile(tiles)
    if start < end:
        split = tl.program_id(1)
        places = start + tl.arange(0, BLOCK_ROWS)
        row = tl.load(rows + places, mask=places < end, other=0).to(tl.int64)
        ranks = tl.arange(0, RANK)
        matrix = down + adapter.to(tl.int64) * RANK * num_inputs
        total = tl.zeros((BLOCK_ROWS, RANK), tl.float32)
        first = split * split_steps * BLOCK_INPUTS
        for begin in range(first, tl.minimum(first + split_steps * BLOCK_INPUTS, num_inputs), BLOCK_INPUTS):
            inputs = begin + tl.arange(0, BLOCK_INPUTS)
            inside = inputs < num_inputs
            values = tl.load(hidden + row[:, None] * hidden_stride + inputs[None, :], mask=inside[None, :], other=0.0)
            weights = tl.load(matrix + ranks[None, :] * num_inputs + inputs[:, None], mask=inside[:, None], other=0.0)
            total = tl.dot(values, weights, total, input_precision="ieee")
        target = low + (split.to(tl.int64) * num_places + places[:, None]) * RANK + ranks[None, :]
        tl.store(target, total, mask=(places < end)[:, None])


@triton.jit
def expand_kernel(
    low, up, out, rows, tiles, num_features, num_places, out_stride, num_splits,
    RANK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_FEATURES: tl.constexpr,
):  # fmt: skip
    """Add the summed parts of `low` times the adapter's `up` to one tile of rows and features."""
    start, end, adapter = _tile(tiles)
    if start < end:
        places = start + tl.arange(0, BLOCK_ROWS)
        inside = places < end
        row = tl.load(rows + places, mask=inside, other=0).to(tl.int64)
        ranks = tl.arange(0, RANK)
        features = tl.program_id(1) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
        parts = low + places[:, None] * RANK + ranks[None, :]
        values = tl.zeros((BLOCK_ROWS, RANK), tl.float32)
        for _ in range(num_splits):
            values += tl.load(parts, mask=inside[:, None], other=0.0)
            parts += num_places * RANK
        matrix = up + adapter.to(tl.int64) * num_features * RANK
        known = features < num_features
        weights = tl.load(matrix + features[None, :] * RANK + ranks[:, None], mask=known[None, :], other=0.0)
        added = tl.dot(values.to(weights.dtype), weights, input_precision="ieee")
        target = out + row[:, None] * out_stride + features[None, :]
        both = inside[:, None] & known[None, :]
        total = tl.load(target, mask=both, other=0.0).to(tl.float32) + added
        tl.store(target, total.to(out.dtype.element_ty), mask=both)


@triton.jit
def _tile(tiles):
    """Return start, end and adapter of this program's tile."""
    tile = tiles + 3 * tl.program_id(0)
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
