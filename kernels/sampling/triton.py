"""Sampling in Triton: `reference` defines the results, and `gumbel_noise` the random numbers.

A row is split over several programs, each of which finds its best token; a second kernel takes the best of these.
Scores are float64, as on the CPU, but few are computed: each tile first gets an upper bound in float32, and only tiles
whose bound exceeds the best score so far are computed.
"""

# Pyright cannot check the types inside Triton kernels.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.backend import num_multiprocessors
from ..runtime.numeric import next_power_of_2
from .launch import TILE, split_row
from .triton_ranks import MIN_TEMPERATURE, load_logits, rank_of
from .types import Sampling

#: Upper bound of the noise: numbers drawn from 53 bits give at most -log(-log(1 - 2**-53)) = 36.7.
_GREATEST_NOISE: tl.constexpr = tl.constexpr(37.0)
#: Allowances for rounding in a float32 upper bound: one relative to the logit, and one absolute.
_RELATIVE_SLACK: tl.constexpr = tl.constexpr(1e-6)
_SLACK: tl.constexpr = tl.constexpr(1e-4)


def launch_sample(logits: Tensor, sampling: Sampling, threshold: Tensor | None) -> Tensor:
    rows, vocabulary = logits.shape
    out = torch.empty((rows,), dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    split = split_row(rows, vocabulary, num_multiprocessors(logits.device))
    scores = torch.empty((rows, split.programs), dtype=torch.float64, device=logits.device)
    tokens = torch.empty((rows, split.programs), dtype=torch.int32, device=logits.device)
    gumbel_max_kernel[(rows, split.programs)](
        logits, sampling.mask, sampling.temperatures, sampling.seeds, sampling.positions, threshold, scores, tokens,
        vocabulary, logits.stride(0), split.tiles,
        HAS_MASK=sampling.mask is not None, TRUNCATES=threshold is not None, TILE=TILE, num_warps=4,
    )  # fmt: skip
    argmax_kernel[(rows,)](scores, tokens, out, split.programs, BLOCK=next_power_of_2(split.programs), num_warps=1)
    return out


@triton.jit(do_not_specialize=["num_tiles"])
def gumbel_max_kernel(
    logits, mask, temperatures, seeds, positions, thresholds, scores, chosen, vocabulary, row_stride, num_tiles,
    HAS_MASK: tl.constexpr, TRUNCATES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find the token with the highest score in one program's tiles of one row."""
    row, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    key = noise_key(tl.load(seeds + row), tl.load(positions + row))
    best, best_token = tl.full((), float("-inf"), tl.float64), tl.full((), 0, tl.int32)
    threshold = tl.load(thresholds + row) if TRUNCATES else 0
    first = program * num_tiles
    for tile in range(first, tl.minimum(first + num_tiles, tl.cdiv(vocabulary, TILE))):
        tokens = tile * TILE + tl.arange(0, TILE)
        values = load_logits(logits + row * row_stride, mask, row, tokens, vocabulary, HAS_MASK)
        if TRUNCATES:
            values = tl.where(rank_of(values, tokens) >= threshold, values, float("-inf"))
        if temperature >= MIN_TEMPERATURE:
            best, best_token = gumbel_max(best, best_token, values, tokens, temperature, key)
        else:
            best, best_token = running_argmax(best, best_token, values.to(tl.float64), tokens)
    place = row * tl.num_programs(1) + program
    tl.store(scores + place, best)
    tl.store(chosen + place, best_token)


@triton.jit(do_not_specialize=["num_programs"])
def argmax_kernel(scores, tokens, out, num_programs, BLOCK: tl.constexpr):
    """Find the token with the highest score among all programs of a row."""
    row = tl.program_id(0).to(tl.int64)
    programs = tl.arange(0, BLOCK)
    inside = programs < num_programs
    best_scores = tl.load(scores + row * num_programs + programs, inside, float("-inf"))
    token = tl.load(tokens + row * num_programs + programs, inside, 0)
    _, best_token = running_argmax(tl.full((), float("-inf"), tl.float64), tl.full((), 0, tl.int32), best_scores, token)
    tl.store(out + row, best_token.to(tl.int64))


@triton.jit
def gumbel_max(best, best_token, values, tokens, temperature, key):
    """Return the best score (value / temperature + noise) of the earlier tiles and this tile, with its token."""
    scaled = values * (1.0 / temperature).to(tl.float32)
    upper = tl.maximum(scaled * (1 + _RELATIVE_SLACK), scaled * (1 - _RELATIVE_SLACK)) + _SLACK
    if tl.max(upper, axis=0).to(tl.float64) + _GREATEST_NOISE > best:
        bits = splitmix64(key + (tokens + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        if tl.max(upper + _noise_bound(bits), axis=0).to(tl.float64) > best:
            score = values.to(tl.float64) / temperature - tl.log(-tl.log(uniform(bits)))
            best, best_token = running_argmax(best, best_token, score, tokens)
    return best, best_token


@triton.jit
def running_argmax(best, best_token, scores, tokens):
    """Return the largest of `best` and `scores`, and its token; of equal scores, the earlier or the lowest token."""
    largest = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == largest, tokens, 0x7FFFFFFF), axis=0)
    return tl.where(largest > best, largest, best), tl.where(largest > best, token, best_token)


@triton.jit
def _noise_bound(bits):
    """Return an upper bound of -log(-log u). With v = 1 - u, the bound is -log v, because -log(1 - v) is at least v.

    v is taken from its first 32 bits, rounded down, and is never below its minimum, 2**-53.
    """
    rest = ((bits ^ 0xFFFFFFFFFFFFFFFF) >> 32).to(tl.int64).to(tl.float32)
    return 22.18070977791825 - tl.log(tl.maximum(rest, 2.0**-21))  # 32 log 2, because rest = v * 2**32


@triton.jit
def noise_key(seed, position):
    return splitmix64(splitmix64(seed.to(tl.uint64)) ^ position.to(tl.uint64))


@triton.jit
def uniform(bits):
    """Convert 64 random bits to a float64 in (0, 1)."""
    return ((bits >> 11).to(tl.int64).to(tl.float64) + 0.5) * (2.0**-53)


@triton.jit
def splitmix64(word):
    """Apply the finalizer of SplitMix64 to uint64."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)
