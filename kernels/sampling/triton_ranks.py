"""Masked logits, ranks and weights of tokens in Triton, for kernels over a vocabulary. `reference` defines ranks."""

# Pyright cannot check the types inside Triton kernels.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from ...protocol import sampling
from .types import MAX_TOKENS, TOKEN_BITS

MIN_TEMPERATURE: tl.constexpr = tl.constexpr(sampling.MIN_TEMPERATURE)
_LAST_TOKEN: tl.constexpr = tl.constexpr(MAX_TOKENS - 1)
WEIGHT_UNIT: tl.constexpr = tl.constexpr(2.0**40)  # weight of the likeliest token, so that a row's sum fits in 64 bits
_TOKEN_BITS: tl.constexpr = tl.constexpr(TOKEN_BITS)


@triton.jit(do_not_specialize=["num_tiles"])
def tile_stats_kernel(
    logits, mask, temperatures, tops, masses, vocabulary, row_stride, num_tiles, row_tiles,
    HAS_MASK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find each tile's highest rank, and its tokens' total weight in units of the likeliest token's weight."""
    row = tl.program_id(0).to(tl.int64)
    temperature = divisor(tl.load(temperatures + row))
    first = tl.program_id(1) * num_tiles
    for tile in range(first, tl.minimum(first + num_tiles, row_tiles)):
        tokens = tile * TILE + tl.arange(0, TILE)
        values = load_logits(logits + row * row_stride, mask, row, tokens, vocabulary, HAS_MASK)
        weights = tl.exp((values - finite(tl.max(values, axis=0))) * (1.0 / temperature).to(tl.float32))
        tl.store(tops + row * row_tiles + tile, tl.max(rank_of(values, tokens), axis=0))
        tl.store(masses + row * row_tiles + tile, tl.sum(weights, axis=0))


@triton.jit
def load_logits(row_logits, mask, row, tokens, vocabulary, HAS_MASK: tl.constexpr):
    """Return logits in float32, -inf for tokens whose mask bit is 0 and beyond the vocabulary."""
    values = tl.load(row_logits + tokens, tokens < vocabulary, float("-inf")).to(tl.float32)
    if HAS_MASK:
        word = tl.load(mask + row * tl.cdiv(vocabulary, 32) + tokens // 32, tokens < vocabulary, 0)
        values = tl.where((word >> (tokens % 32)) & 1 == 1, values, float("-inf"))
    return values


@triton.jit
def load_ranks(row_logits, mask, row, tile, vocabulary, HAS_MASK: tl.constexpr, TILE: tl.constexpr):
    """Return the ranks of a tile's tokens. Token ids beyond the vocabulary have a logit of -inf."""
    tokens = tile * TILE + tl.arange(0, TILE)
    return rank_of(load_logits(row_logits, mask, row, tokens, vocabulary, HAS_MASK), tokens)


@triton.jit
def rank_of(values, tokens):
    ordered = _sortable_bits(tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True))
    return (ordered.to(tl.int64) << _TOKEN_BITS) + (tokens ^ _LAST_TOKEN)


@triton.jit
def least_rank(value):
    """Return the lowest rank of tokens with this logit."""
    return _sortable_bits(value.to(tl.float32).to(tl.int32, bitcast=True)).to(tl.int64) << _TOKEN_BITS


@triton.jit
def logit_of(rank):
    return _sortable_bits((rank >> _TOKEN_BITS).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def token_of(rank):
    return (rank & _LAST_TOKEN) ^ _LAST_TOKEN


@triton.jit
def _sortable_bits(bits):
    """Convert the bits of floats to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def weights_of(ranks, top, temperature):
    """Return exp((logit - highest logit) / temperature) in units of 2**-40, from ranks."""
    below = logit_of(ranks) - finite(logit_of(top))
    return (tl.exp(below * (1.0 / temperature).to(tl.float32)) * WEIGHT_UNIT).to(tl.int64)


@triton.jit
def finite(value):
    return tl.where(value == float("-inf"), 0.0, value)


@triton.jit
def divisor(temperature):
    return tl.where(temperature >= MIN_TEMPERATURE, temperature, 1.0)


@triton.jit
def is_random(temperatures, row):
    return tl.load(temperatures + row) >= MIN_TEMPERATURE
