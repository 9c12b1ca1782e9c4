"""Tiles and split-K of products with quantized weights: plain functions, without Triton or a device."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.launch import Launch
from ..runtime.numeric import cdiv

#: Number of programs that keep one multiprocessor's memory pipeline full while each waits for its next tile.
_RESIDENT = 8
#: Minimum steps per split: with fewer, filling the pipeline and adding another partial sum cost more than they save.
_MIN_STEPS = 4
_BUCKETS = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class MatmulShape:
    # Number of rows of activations.
    tokens: int
    # Number of output features.
    features: int
    # Number of steps of the loop over the inputs.
    steps: int


@dataclass(frozen=True, slots=True)
class SplitK:
    """Split of the loop over the inputs into `count` parts of at most `steps` steps; the results are summed later."""

    count: int
    steps: int


def matmul_launch(tokens: int) -> Launch:
    """Return the launch for a number of tokens.

    For few tokens, reading the weights takes most of the time, so tiles are narrow and pipelines deep. For many tokens,
    tiles are 128 tokens wide, so that a weight is converted once for 128 tokens.
    """
    bucket = next((most for most in _BUCKETS if tokens <= most), 128)
    if bucket == 16:
        return Launch(num_warps=2, num_stages=4, tiles={"BLOCK_FEATURES": 32, "BLOCK_TOKENS": 16})
    if bucket < 128:
        return Launch(num_warps=4, num_stages=4, tiles={"BLOCK_FEATURES": 64, "BLOCK_TOKENS": bucket})
    return Launch(num_warps=8, num_stages=3, tiles={"BLOCK_FEATURES": 128, "BLOCK_TOKENS": 128})


def split_k(product: MatmulShape, launch: Launch, multiprocessors: int) -> SplitK:
    """Split the loop so that the product fills the GPU. Large products have enough tiles and are not split."""
    tiles = cdiv(product.features, launch.tiles["BLOCK_FEATURES"])
    tiles *= cdiv(product.tokens, launch.tiles["BLOCK_TOKENS"])
    resident = _RESIDENT * 2 // launch.num_warps
    splits = max(1, min(resident * multiprocessors // tiles, product.steps // _MIN_STEPS))
    steps = cdiv(product.steps, splits)
    return SplitK(cdiv(product.steps, steps), steps)


def inputs_per_step(num_inputs: int, num_tokens: int) -> int:
    """Return the largest of 128, 64, 32 and 16 that divides `num_inputs`; at most 64 for more than 16 tokens."""
    longest = 128 if num_tokens <= _BUCKETS[0] else 64
    return next(step for step in (128, 64, 32, 16) if step <= longest and num_inputs % step == 0)
