"""Probabilities in Triton: see `reference` for what is computed.

Both functions first sum tiles, each in units of its own largest term, and then combine the sums of a row in a fixed
order: the number of programs changes nothing.
"""

# Kernels are typed by Triton, not by Python.
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
from .triton_ranks import MIN_TEMPERATURE, divisor, finite, load_logits, logit_of, rank_of, token_of
from .types import LOWEST_RANK, Sampling, TopLogprobs

_LOWEST: tl.constexpr = tl.constexpr(LOWEST_RANK)


def launch_probabilities(logits: Tensor, sampling: Sampling, threshold: Tensor | None) -> Tensor:
    rows, vocabulary = logits.shape
    out = torch.empty((rows, vocabulary), dtype=torch.float32, device=logits.device)
    if rows == 0:
        return out
    split = split_row(rows, vocabulary, num_multiprocessors(logits.device))
    tops = torch.empty((rows, split.row_tiles), dtype=torch.int64, device=logits.device)
    masses = torch.empty((rows, split.row_tiles), dtype=torch.float32, device=logits.device)
    inputs = logits, sampling.mask, sampling.temperatures, threshold, tops, masses
    shape = vocabulary, logits.stride(0), split.tiles, split.row_tiles
    options = {"HAS_MASK": sampling.mask is not None, "TRUNCATES": threshold is not None, "TILE": TILE, "num_warps": 4}
    kept_tile_stats_kernel[(rows, split.programs)](*inputs, *shape, **options)
    normalise_kernel[(rows, split.programs)](*inputs, out, *shape, **options, BLOCK=next_power_of_2(split.row_tiles))
    return out


def launch_log_probabilities(logits: Tensor, chosen: Tensor, num_top: int) -> TopLogprobs:
    rows, vocabulary = logits.shape
    device = logits.device
    picked = torch.empty((rows,), dtype=torch.float32, device=device)
    values = torch.empty((rows, num_top), dtype=torch.float32, device=device)
    ids = torch.empty((rows, num_top), dtype=torch.int64, device=device)
    if rows == 0:
        return TopLogprobs(picked, values, ids)
    tiles = triton.cdiv(vocabulary, TILE)
    most = max(1, num_top)  # the largest of a tile is needed for its sum
    tops = torch.empty((rows, tiles, most), dtype=torch.int64, device=device)
    masses = torch.empty((rows, tiles), dtype=torch.float32, device=device)
    tile_tops_kernel[(rows, tiles)](logits, tops, masses, vocabulary, logits.stride(0), most, TILE=TILE, num_warps=4)
    row_tops_kernel[(rows,)](
        logits, chosen, tops, masses, picked, values, ids, logits.stride(0), tiles, most, num_top,
        TILES=next_power_of_2(tiles), BLOCK=next_power_of_2(tiles * most), num_warps=8,
    )  # fmt: skip
    return TopLogprobs(picked, values, ids)


@triton.jit(do_not_specialize=["num_tiles"])
def kept_tile_stats_kernel(
    logits, mask, temperatures, thresholds, tops, masses, vocabulary, row_stride, num_tiles, row_tiles,
    HAS_MASK: tl.constexpr, TRUNCATES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The highest rank of each tile, and the weight of its kept tokens in units of the highest one's."""
    row = tl.program_id(0).to(tl.int64)
    scale = (1.0 / divisor(tl.load(temperatures + row))).to(tl.float32)
    first = tl.program_id(1) * num_tiles
    for tile in range(first, tl.minimum(first + num_tiles, row_tiles)):
        tokens = tile * TILE + tl.arange(0, TILE)
        values = load_logits(logits + row * row_stride, mask, row, tokens, vocabulary, HAS_MASK)
        top = tl.max(values, axis=0)
        tl.store(tops + row * row_tiles + tile, tl.max(rank_of(values, tokens), axis=0))
        values = _truncated(values, tokens, thresholds, row, TRUNCATES)
        tl.store(masses + row * row_tiles + tile, tl.sum(tl.exp((values - finite(top)) * scale), axis=0))


@triton.jit(do_not_specialize=["num_tiles"])
def normalise_kernel(
    logits, mask, temperatures, thresholds, tops, masses, out, vocabulary, row_stride, num_tiles, row_tiles,
    HAS_MASK: tl.constexpr, TRUNCATES: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    scale = (1.0 / divisor(temperature)).to(tl.float32)
    tiles = tl.arange(0, BLOCK)
    tile_tops = tl.load(tops + row * row_tiles + tiles, tiles < row_tiles, _LOWEST)
    tile_masses = tl.load(masses + row * row_tiles + tiles, tiles < row_tiles, 0.0)
    top = tl.max(tile_tops, axis=0)
    mass = _sum_of_exponentials(tile_tops, tile_masses, tiles < row_tiles, finite(logit_of(top)), scale)
    first = tl.program_id(1) * num_tiles
    for tile in range(first, tl.minimum(first + num_tiles, row_tiles)):
        tokens = tile * TILE + tl.arange(0, TILE)
        values = load_logits(logits + row * row_stride, mask, row, tokens, vocabulary, HAS_MASK)
        kept = _truncated(values, tokens, thresholds, row, TRUNCATES)
        drawn = tl.exp((kept - finite(logit_of(top))) * scale) / tl.where(mass > 0, mass, 1.0)
        greedy = tl.where(rank_of(values, tokens) == top, 1.0, 0.0)
        result = tl.where(temperature >= MIN_TEMPERATURE, drawn, greedy)
        tl.store(out + row * vocabulary + tokens, result, tokens < vocabulary)


@triton.jit(do_not_specialize=["most"])
def tile_tops_kernel(logits, tops, masses, vocabulary, row_stride, most, TILE: tl.constexpr):
    """The `most` highest ranks of a tile, and the sum of its exponentials in units of the largest."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * tl.num_programs(1) + tile
    tokens = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * row_stride + tokens, tokens < vocabulary, float("-inf")).to(tl.float32)
    tl.store(masses + place, tl.sum(tl.exp(values - finite(tl.max(values, axis=0))), axis=0))
    found = rank_of(values, tokens)
    for index in range(most):
        top = tl.max(found, axis=0)
        tl.store(tops + place * most + index, top)
        found = tl.where(found == top, _LOWEST, found)


@triton.jit(do_not_specialize=["most", "num_top"])
def row_tops_kernel(
    logits, chosen, tops, masses, picked, values, ids, row_stride, num_tiles, most, num_top,
    TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine the tiles of a row."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    inside = tiles < num_tiles
    tile_tops = tl.load(tops + (row * num_tiles + tiles) * most, inside, _LOWEST)
    tile_masses = tl.load(masses + row * num_tiles + tiles, inside, 0.0)
    greatest = finite(logit_of(tl.max(tile_tops, axis=0)))
    norm = greatest + tl.log(_sum_of_exponentials(tile_tops, tile_masses, inside, greatest, 1.0))
    token = tl.load(chosen + row)
    tl.store(picked + row, tl.load(logits + row * row_stride + token).to(tl.float32) - norm)
    places = tl.arange(0, BLOCK)
    found = tl.load(tops + row * num_tiles * most + places, places < num_tiles * most, _LOWEST)
    for index in range(num_top):
        top = tl.max(found, axis=0)
        tl.store(values + row * num_top + index, logit_of(top) - norm)
        tl.store(ids + row * num_top + index, token_of(top))
        found = tl.where(found == top, _LOWEST, found)


@triton.jit
def _truncated(values, tokens, thresholds, row, TRUNCATES: tl.constexpr):
    if TRUNCATES:
        return tl.where(rank_of(values, tokens) >= tl.load(thresholds + row), values, float("-inf"))
    return values


@triton.jit
def _sum_of_exponentials(tile_tops, tile_masses, inside, greatest, scale):
    """The sum of all exponentials in units of exp(greatest * scale)."""
    shares = tile_masses * tl.exp((logit_of(tile_tops) - greatest) * scale)
    return tl.sum(tl.where(inside, shares, 0.0), axis=0)
