"""Radix select over ranks in Triton: each round finds the bucket of 16 that contains the threshold."""

# Kernels are typed by Triton, not by Python.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from .triton_ranks import weights_of
from .types import LOWEST_RANK, TOKEN_BITS

LOWEST: tl.constexpr = tl.constexpr(LOWEST_RANK)
#: Rounds of four bits each, until one rank is left.
ROUNDS: tl.constexpr = tl.constexpr((32 + TOKEN_BITS) // 4)
#: Index of the highest rank in a row's state.
TOP: tl.constexpr = tl.constexpr(0)


@triton.jit
def radix_range(row_sums, target, done):
    """Return the lowest rank of the range after `done` rounds, and the sum of everything above the range."""
    low, above = tl.full((), LOWEST, tl.int64), tl.full((), 0, tl.int64)
    for earlier in range(done):
        low, above = select_bucket(tl.load(row_sums + earlier * 16 + tl.arange(0, 16)), low, above, target, earlier)
    return low, above


@triton.jit
def select_bucket(total, low, above, target, done):
    """Select the highest of 16 buckets at which the sum from above reaches the target, or the lowest bucket."""
    buckets = tl.arange(0, 16)
    from_on = above + tl.sum(tl.where(buckets[None, :] >= buckets[:, None], total[None, :], 0), axis=1)
    bucket = tl.max(tl.where(from_on >= target, buckets, 0), axis=0)
    above += tl.sum(tl.where(buckets > bucket, total, 0), axis=0)
    return low + (bucket.to(tl.int64) << _shift(done)), above


@triton.jit
def bucket_sums(ranks, low, done, row_state, temperature, BY_MASS: tl.constexpr):
    """Return (16,) int64: the number or weight of the ranks in each bucket of the range."""
    is_in = bucket_of(ranks, low, done)[None, :] == tl.arange(0, 16)[:, None]
    if BY_MASS:
        weights = weights_of(ranks, tl.load(row_state + TOP), temperature)
        return tl.sum(tl.where(is_in, weights[None, :], 0), axis=1)
    return tl.sum(tl.where(is_in, 1.0, 0.0), axis=1).to(tl.int64)  # as floats: the integer version spills registers


@triton.jit
def bucket_of(ranks, low, done):
    """Return the bucket of each rank; below 0 or above 15 outside the range."""
    return tl.minimum(tl.maximum((ranks - low) >> _shift(done), -1), 16).to(tl.int32)


@triton.jit
def _shift(done):
    """Return the number of bits of a rank that are undecided after one more round."""
    return (ROUNDS - 1 - done) * 4
