"""Top-k, top-p and min-p thresholds in Triton, without sorting; `reference` defines ranks and thresholds.

The top-k threshold is the largest rank such that at least k tokens have this rank or a higher one; for top-p, such that
these tokens have at least the probability p. Radix select finds both, four bits at a time: it counts the tokens of a
range (or adds their weights) in 16 buckets, and the bucket that contains the threshold becomes the next range.

1. `tile_stats_kernel`, `row_stats_kernel`: the highest rank and the mass of each tile and row, lower bounds for both
   thresholds.
2. `radix_histogram_kernel`, four times: every program counts its own tiles and adds to sums in memory. Tiles whose
   highest rank is below the range are not read; unless the logits are flat, these are nearly all of a row.
3. `gather_candidates_kernel`, `radix_select_kernel`: the few tokens left are collected, and one program finds the last
   36 bits.

Weights are integers, so that the order of additions does not matter: a row has the same thresholds in every batch.
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
from .launch import TILE, RowSplit, split_row
from .triton_ranks import (
    WEIGHT_UNIT,
    divisor,
    finite,
    is_random,
    least_rank,
    load_ranks,
    logit_of,
    tile_stats_kernel,
    weights_of,
)
from .types import LOWEST_RANK, TOKEN_BITS, LogitRows, Truncation

LOWEST: tl.constexpr = tl.constexpr(LOWEST_RANK)
#: Number of rounds of the search. Each round decides four bits, until a single rank is left.
ROUNDS: tl.constexpr = tl.constexpr((32 + TOKEN_BITS) // 4)
#: Index of the row's highest rank in the state of a row.
TOP: tl.constexpr = tl.constexpr(0)


@triton.jit
def radix_range(row_sums, target, done):
    """Return the lowest rank of the range after `done` rounds, and the count or weight of all ranks above the range."""
    low, above = tl.full((), LOWEST, tl.int64), tl.full((), 0, tl.int64)
    for earlier in range(done):
        low, above = select_bucket(tl.load(row_sums + earlier * 16 + tl.arange(0, 16)), low, above, target, earlier)
    return low, above


@triton.jit
def select_bucket(total, low, above, target, done):
    """Select the highest of 16 buckets that, with all higher ranks, reaches `target`; if no bucket does, the lowest.
    Return the lowest rank of the bucket, and the count or weight of all ranks above the bucket."""
    buckets = tl.arange(0, 16)
    from_on = above + tl.sum(tl.where(buckets[None, :] >= buckets[:, None], total[None, :], 0), axis=1)
    bucket = tl.max(tl.where(from_on >= target, buckets, 0), axis=0)
    above += tl.sum(tl.where(buckets > bucket, total, 0), axis=0)
    return low + (bucket.to(tl.int64) << _shift(done)), above


@triton.jit
def bucket_sums(ranks, low, done, row_state, temperature, BY_MASS: tl.constexpr):
    """Return the number or weight of the ranks in each of the range's 16 buckets, (16,) int64."""
    is_in = bucket_of(ranks, low, done)[None, :] == tl.arange(0, 16)[:, None]
    if BY_MASS:
        weights = weights_of(ranks, tl.load(row_state + TOP), temperature)
        return tl.sum(tl.where(is_in, weights[None, :], 0), axis=1)
    return tl.sum(tl.where(is_in, 1.0, 0.0), axis=1).to(tl.int64)  # adding integers would spill registers


@triton.jit
def bucket_of(ranks, low, done):
    """Return the histogram bucket, 0 to 15, of each logit rank; -1 or 16 for ranks outside the bucket range."""
    return tl.minimum(tl.maximum((ranks - low) >> _shift(done), -1), 16).to(tl.int32)


@triton.jit
def _shift(done):
    """Return the number of a rank's bits that are undecided after round `done`, which is counted from 0."""
    return (ROUNDS - 1 - done) * 4


_TOKEN_BITS: tl.constexpr = tl.constexpr(TOKEN_BITS)
_RANK_OF_MINUS_INFINITY: tl.constexpr = tl.constexpr(-0x7F800001 << TOKEN_BITS)
#: Number of rounds in which all programs of a row take part; these decide the upper 16 bits of the logit.
_SHARED_ROUNDS: tl.constexpr = tl.constexpr(4)
#: Maximum number of tokens collected from a row. If more are left, the last rounds read the whole row.
_CAPACITY: tl.constexpr = tl.constexpr(4096)

# State of a row, int64 each: highest rank; total weight, of which top-p keeps a share; lower bounds of the thresholds
# of top-k and top-p; threshold of min-p; thresholds found for top-k and top-p.
_STATE: tl.constexpr = tl.constexpr(7)
_MASS: tl.constexpr = tl.constexpr(1)
_FLOOR: tl.constexpr = tl.constexpr(2)  # index of top-k's lower bound; top-p's is next
_BY_MIN_P: tl.constexpr = tl.constexpr(4)
_THRESHOLD: tl.constexpr = tl.constexpr(5)  # index of top-k's threshold; top-p's is next


def launch_thresholds(rows: LogitRows, truncation: Truncation) -> Tensor:
    logits, temperatures, mask = rows
    num_rows, vocabulary = logits.shape
    split = split_row(num_rows, vocabulary, num_multiprocessors(logits.device))
    tops = torch.empty((num_rows, split.row_tiles), dtype=torch.int64, device=logits.device)
    masses = torch.empty((num_rows, split.row_tiles), dtype=torch.float32, device=logits.device)
    state = torch.empty((num_rows, _STATE.value), dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return state[:, 0]
    tiles = split.tiles, split.row_tiles
    tile_stats_kernel[(num_rows, split.programs)](
        logits, mask, temperatures, tops, masses, vocabulary, logits.stride(0), *tiles,
        HAS_MASK=mask is not None, TILE=TILE, num_warps=4,
    )  # fmt: skip
    row_stats_kernel[(num_rows,)](
        temperatures, tops, masses, truncation.top_k, truncation.top_p, truncation.min_p, state,
        vocabulary, split.row_tiles,
        HAS_TOP_K=truncation.top_k is not None, HAS_TOP_P=truncation.top_p is not None,
        HAS_MIN_P=truncation.min_p is not None, BLOCK=next_power_of_2(split.row_tiles), num_warps=1,
    )  # fmt: skip
    if truncation.top_k is not None:
        _search(rows, truncation.top_k, state, tops, split)
    if truncation.top_p is not None:
        if truncation.top_k is not None:
            kept_mass_kernel[(num_rows, split.programs)](
                logits, mask, temperatures, truncation.top_k, state, tops, vocabulary, logits.stride(0), *tiles,
                HAS_MASK=mask is not None, TILE=TILE, num_warps=4,
            )  # fmt: skip
        _search(rows, truncation.top_p, state, tops, split)
    return torch.minimum(state[:, TOP.value], state[:, _BY_MIN_P.value :].amax(dim=1))


def _search(rows: LogitRows, amounts: Tensor, state: Tensor, tops: Tensor, split: RowSplit) -> None:
    """Find the thresholds of top-k (`amounts` are integers) or of top-p (floats), and write them into `state`."""
    logits, temperatures, mask = rows
    num_rows, vocabulary = logits.shape
    sums = torch.zeros((num_rows, _SHARED_ROUNDS.value, 16), dtype=torch.int64, device=logits.device)
    counts = torch.zeros((num_rows,), dtype=torch.int32, device=logits.device)
    left = torch.empty((num_rows, _CAPACITY.value), dtype=torch.int64, device=logits.device)
    inputs = logits, mask, temperatures, amounts, state, tops, sums
    shape = vocabulary, logits.stride(0), split.tiles, split.row_tiles
    options = {"BY_MASS": amounts.is_floating_point(), "HAS_MASK": mask is not None, "TILE": TILE, "num_warps": 8}
    for done in range(_SHARED_ROUNDS.value):
        radix_histogram_kernel[(num_rows, split.programs)](*inputs, done, *shape, **options)
    gather_candidates_kernel[(num_rows, split.programs)](*inputs, counts, left, *shape, **options)
    radix_select_kernel[(num_rows,)](*inputs, counts, left, vocabulary, logits.stride(0), split.row_tiles, **options)


@triton.jit
def row_stats_kernel(
    temperatures, tops, masses, top_k, top_p, min_p, state, vocabulary, row_tiles,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the state of a row from its tiles."""
    row = tl.program_id(0).to(tl.int64)
    temperature = divisor(tl.load(temperatures + row))
    tiles = tl.arange(0, BLOCK)
    inside = tiles < row_tiles
    tile_tops = tl.load(tops + row * row_tiles + tiles, inside, LOWEST)
    top = tl.max(tile_tops, axis=0)
    greatest = finite(logit_of(top))
    below = (logit_of(tile_tops) - greatest).to(tl.float64) / temperature
    mass = tl.sum(tl.where(inside, tl.load(masses + row * row_tiles + tiles, inside, 0.0) * tl.exp(below), 0.0), axis=0)
    row_state = state + row * _STATE
    tl.store(row_state + TOP, top)
    tl.store(row_state + _MASS, (mass * WEIGHT_UNIT).to(tl.int64))
    floor = tl.full((), LOWEST, tl.int64)
    if HAS_TOP_K:
        floor = _top_k_floor(tile_tops, tl.load(top_k + row))
    tl.store(row_state + _FLOOR, floor)
    floor = tl.full((), LOWEST, tl.int64)
    if HAS_TOP_P:
        # Lower bound: all tokens below this probability have at most half of the mass that top-p may leave out.
        least = tl.maximum(1 - tl.load(top_p + row), 1e-9) * 0.5 * mass / vocabulary
        floor = least_rank(greatest + temperature * tl.log(tl.maximum(least, 1e-300)))
    tl.store(row_state + _FLOOR + 1, floor)
    threshold = tl.full((), LOWEST, tl.int64)
    if HAS_MIN_P:
        least = tl.load(min_p + row)
        threshold = least_rank(greatest + temperature * tl.log(tl.maximum(least, 1e-300)))
        threshold = tl.where((least > 0) & is_random(temperatures, row), threshold, LOWEST)
    tl.store(row_state + _BY_MIN_P, threshold)
    tl.store(row_state + _THRESHOLD, LOWEST)
    tl.store(row_state + _THRESHOLD + 1, LOWEST)


@triton.jit(do_not_specialize=["num_tiles"])
def kept_mass_kernel(
    logits, mask, temperatures, top_k, state, tops, vocabulary, row_stride, num_tiles, row_tiles,
    HAS_MASK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the weights of the tokens that top-k keeps to the row's mass, which `radix_select_kernel` has set to zero."""
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(top_k + row) == 0) | (not is_random(temperatures, row)):
        return
    row_state = state + row * _STATE
    top, threshold = tl.load(row_state + TOP), tl.load(row_state + _THRESHOLD)
    mass = tl.full((), 0, tl.int64)
    first = tl.program_id(1) * num_tiles
    for tile in range(first, tl.minimum(first + num_tiles, row_tiles)):
        if tl.load(tops + row * row_tiles + tile) >= threshold:
            ranks = load_ranks(logits + row * row_stride, mask, row, tile, vocabulary, HAS_MASK, TILE)
            weights = weights_of(ranks, top, tl.load(temperatures + row))
            mass += tl.sum(tl.where(ranks >= threshold, weights, 0), axis=0)
    if mass > 0:
        tl.atomic_add(row_state + _MASS, mass, sem="relaxed")


@triton.jit(do_not_specialize=["done", "num_tiles"])
def radix_histogram_kernel(
    logits, mask, temperatures, amounts, state, tops, sums, done, vocabulary, row_stride, num_tiles, row_tiles,
    BY_MASS: tl.constexpr, HAS_MASK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Run one round: add the counts or weights in this program's tiles to the 16 buckets of the current range."""
    row = tl.program_id(0).to(tl.int64)
    row_state = state + row * _STATE
    target = _target(temperatures, amounts, row_state, row, BY_MASS)
    if target == 0:
        return
    row_sums = sums + row * (_SHARED_ROUNDS * 16)
    low, _ = radix_range(row_sums, target, done)
    floor = tl.maximum(low, tl.load(row_state + _FLOOR + BY_MASS))
    if BY_MASS:
        floor = tl.maximum(floor, tl.load(row_state + _THRESHOLD))  # top-k has removed the tokens below its threshold
    total = tl.zeros((16,), tl.int64)
    first = tl.program_id(1) * num_tiles
    for tile in range(first, tl.minimum(first + num_tiles, row_tiles)):
        if tl.load(tops + row * row_tiles + tile) >= floor:
            ranks = load_ranks(logits + row * row_stride, mask, row, tile, vocabulary, HAS_MASK, TILE)
            total += bucket_sums(ranks, low, done, row_state, tl.load(temperatures + row), BY_MASS)
    tl.atomic_add(row_sums + done * 16 + tl.arange(0, 16), total, mask=total > 0, sem="relaxed")


@triton.jit(do_not_specialize=["num_tiles"])
def gather_candidates_kernel(
    logits, mask, temperatures, amounts, state, tops, sums, counts, left, vocabulary, row_stride, num_tiles, row_tiles,
    BY_MASS: tl.constexpr, HAS_MASK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Collect the ranks of the current range, in any order."""
    row = tl.program_id(0).to(tl.int64)
    target = _target(temperatures, amounts, state + row * _STATE, row, BY_MASS)
    if target == 0:
        return
    low, _ = radix_range(sums + row * (_SHARED_ROUNDS * 16), target, _SHARED_ROUNDS)
    first = tl.program_id(1) * num_tiles
    for tile in range(first, tl.minimum(first + num_tiles, row_tiles)):
        if tl.load(tops + row * row_tiles + tile) >= low:
            ranks = load_ranks(logits + row * row_stride, mask, row, tile, vocabulary, HAS_MASK, TILE)
            wanted = bucket_of(ranks, low, _SHARED_ROUNDS - 1) == 0
            number = tl.sum(wanted.to(tl.int32), axis=0)
            if number > 0:
                place = tl.atomic_add(counts + row, number, sem="relaxed") + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
                tl.store(left + row * _CAPACITY + place, ranks, wanted & (place < _CAPACITY))


@triton.jit
def radix_select_kernel(
    logits, mask, temperatures, amounts, state, tops, sums, counts, left, vocabulary, row_stride, row_tiles,
    BY_MASS: tl.constexpr, HAS_MASK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Run the remaining rounds over the collected ranks, or over the row if there were too many to collect."""
    row = tl.program_id(0).to(tl.int64)
    row_state = state + row * _STATE
    target = _target(temperatures, amounts, row_state, row, BY_MASS)
    if target == 0:
        return
    low, above = radix_range(sums + row * (_SHARED_ROUNDS * 16), target, _SHARED_ROUNDS)
    count = tl.load(counts + row)
    is_collected = count <= _CAPACITY
    sources = tl.where(is_collected, tl.cdiv(count, TILE), row_tiles)
    for done in range(_SHARED_ROUNDS, ROUNDS):
        total = tl.zeros((16,), tl.int64)
        for tile in range(sources):
            if is_collected:
                places = tile * TILE + tl.arange(0, TILE)
                ranks = tl.load(left + row * _CAPACITY + places, places < count, _RANK_OF_MINUS_INFINITY)
                total += bucket_sums(ranks, low, done, row_state, tl.load(temperatures + row), BY_MASS)
            elif tl.load(tops + row * row_tiles + tile) >= low:
                ranks = load_ranks(logits + row * row_stride, mask, row, tile, vocabulary, HAS_MASK, TILE)
                total += bucket_sums(ranks, low, done, row_state, tl.load(temperatures + row), BY_MASS)
        low, above = select_bucket(total, low, above, target, done)
    tl.store(row_state + _THRESHOLD + BY_MASS, low)
    if not BY_MASS:
        tl.store(row_state + _MASS, tl.full((), 0, tl.int64))


@triton.jit
def _target(temperatures, amounts, row_state, row, BY_MASS: tl.constexpr):
    """Return the number or weight of tokens to keep at or above the threshold; 0 if the row has no such threshold."""
    amount = tl.load(amounts + row)
    if BY_MASS:
        mass = tl.maximum((amount * tl.load(row_state + _MASS).to(tl.float64)).to(tl.int64), 1)
        target = tl.where(amount < 1, mass, 0)
    else:
        target = amount.to(tl.int64)
    return tl.where(is_random(temperatures, row), target, 0)


@triton.jit
def _top_k_floor(tile_tops, k):
    """Return a lower bound of the threshold: the k-th highest of the tiles' highest ranks, rounded down to 24 bits."""
    floor = tl.full((), LOWEST, tl.int64)
    for done in range(24):
        higher = floor + (tl.full((), 1, tl.int64) << (_TOKEN_BITS + 31 - done))
        floor = tl.where(tl.sum((tile_tops >= higher).to(tl.int32), axis=0) >= k, higher, floor)
    return floor
