"""Log-probabilities in Triton; `reference` defines the results.

Tiles are summed first, each in units of its own largest term. The sums of a row are combined in a fixed order.
"""

# Pyright cannot check the types inside Triton kernels.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.numeric import next_power_of_2
from .launch import TILE
from .triton_ranks import finite, logit_of, rank_of, token_of
from .types import LOWEST_RANK, TopLogprobs

_LOWEST: tl.constexpr = tl.constexpr(LOWEST_RANK)


def launch_log_probabilities(logits: Tensor, chosen: Tensor, num_top: int) -> TopLogprobs:
    rows, vocabulary = logits.shape
    device = logits.device
    picked = torch.empty((rows,), dtype=torch.float32, device=device)
    values = torch.empty((rows, num_top), dtype=torch.float32, device=device)
    ids = torch.empty((rows, num_top), dtype=torch.int64, device=device)
    if rows == 0:
        return TopLogprobs(picked, values, ids)
    tiles = triton.cdiv(vocabulary, TILE)
    most = max(1, num_top)  # at least one, because a tile's sum is relative to its largest logit
    tops = torch.empty((rows, tiles, most), dtype=torch.int64, device=device)
    masses = torch.empty((rows, tiles), dtype=torch.float32, device=device)
    tile_tops_kernel[(rows, tiles)](logits, tops, masses, vocabulary, logits.stride(0), most, TILE=TILE, num_warps=4)
    row_tops_kernel[(rows,)](
        logits, chosen, tops, masses, picked, values, ids, logits.stride(0), tiles, most, num_top,
        TILES=next_power_of_2(tiles), BLOCK=next_power_of_2(tiles * most), num_warps=8,
    )  # fmt: skip
    return TopLogprobs(picked, values, ids)


@triton.jit(do_not_specialize=["most"])
def tile_tops_kernel(logits, tops, masses, vocabulary, row_stride, most, TILE: tl.constexpr):
    """Find the `most` highest ranks of a tile, and the sum of its exponentials in units of the largest."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * tl.num_programs(1) + tile
    tokens = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * row_stride + tokens, tokens < vocabulary, float("-inf")).to(tl.float32)
    tl.store(masses + place, tl.sum(tl.exp(values - finite(tl.max(values, axis=0))), axis=0))
    ranks = rank_of(values, tokens)
    for index in range(most):
        top = tl.max(ranks, axis=0)
        tl.store(tops + place * most + index, top)
        ranks = tl.where(ranks == top, _LOWEST, ranks)


@triton.jit(do_not_specialize=["most", "num_top"])
def row_tops_kernel(
    logits, chosen, tops, masses, picked, values, ids, row_stride, num_tiles, most, num_top,
    TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the log-probabilities of a row from the results of its tiles."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    inside = tiles < num_tiles
    tile_tops = tl.load(tops + (row * num_tiles + tiles) * most, inside, _LOWEST)
    tile_masses = tl.load(masses + row * num_tiles + tiles, inside, 0.0)
    greatest = finite(logit_of(tl.max(tile_tops, axis=0)))
    norm = greatest + tl.log(_sum_of_exponentials(tile_tops, tile_masses, inside, greatest))
    token = tl.load(chosen + row)
    tl.store(picked + row, tl.load(logits + row * row_stride + token).to(tl.float32) - norm)
    places = tl.arange(0, BLOCK)
    ranks = tl.load(tops + row * num_tiles * most + places, places < num_tiles * most, _LOWEST)
    for index in range(num_top):
        top = tl.max(ranks, axis=0)
        tl.store(values + row * num_top + index, logit_of(top) - norm)
        tl.store(ids + row * num_top + index, token_of(top))
        ranks = tl.where(ranks == top, _LOWEST, ranks)


@triton.jit
def _sum_of_exponentials(tile_tops, tile_masses, inside, greatest):
    """Return the sum of all exponentials in units of exp(greatest)."""
    shares = tile_masses * tl.exp(logit_of(tile_tops) - greatest)
    return tl.sum(tl.where(inside, shares, 0.0), axis=0)
