"""Speculative verification in Triton: see `verification.py` for the rules.

Whether drafts are accepted is decided by one program for each sequence. Rejection sampling then has one more token to
draw for each, from a row of the vocabulary that several programs share, as in `sampling_triton.py`.
"""

# Triton's language is untyped: its tensors and pointers are whatever the compiler makes of them.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .backend import num_multiprocessors
from .row_launch import power_of_two
from .sampling_triton import mixed, noise_key, pick_kernel, race, uniform
from .verification import LEFTOVER, Chances, Drafts, Verified
from .vocabulary_launch import TILE, share_row

_LEFTOVER: tl.constexpr = tl.constexpr(LEFTOVER)


def launch_verify_coupled(drafts: Drafts, sampled: Tensor) -> Verified:
    accepted, tokens = _outputs(drafts)
    if len(accepted):
        coupled_kernel[(len(accepted),)](
            drafts.token_ids, drafts.starts, sampled, accepted, tokens, drafts.longest + 1,
            BLOCK=power_of_two(drafts.longest + 1), num_warps=1,
        )  # fmt: skip
    return Verified(accepted, tokens)


def launch_verify_by_rejection(drafts: Drafts, chances: Chances) -> Verified:
    accepted, tokens = _outputs(drafts)
    sequences, vocabulary = len(accepted), chances.target.shape[1]
    if sequences == 0:
        return Verified(accepted, tokens)
    has_draft = chances.draft is not None
    strides = chances.target.stride(0), chances.draft.stride(0) if chances.draft is not None else 0
    inputs = drafts.token_ids, drafts.starts, chances.target, chances.draft, chances.seeds, chances.positions, accepted
    accept_kernel[(sequences,)](
        *inputs, tokens, *strides, drafts.longest + 1,
        HAS_DRAFT=has_draft, BLOCK=power_of_two(drafts.longest + 1), num_warps=1,
    )  # fmt: skip
    share = share_row(sequences, vocabulary, num_multiprocessors(accepted.device))
    scores = torch.empty((sequences, share.programs), dtype=torch.float64, device=accepted.device)
    chosen = torch.empty((sequences, share.programs), dtype=torch.int32, device=accepted.device)
    recover_kernel[(sequences, share.programs)](
        *inputs, scores, chosen, vocabulary, *strides, share.tiles, HAS_DRAFT=has_draft, TILE=TILE, num_warps=4
    )
    pick_kernel[(sequences,)](
        scores, chosen, tokens, accepted, share.programs, drafts.longest + 1,
        HAS_PLACES=True, BLOCK=power_of_two(share.programs), num_warps=1,
    )  # fmt: skip
    return Verified(accepted, tokens)


def _outputs(drafts: Drafts) -> tuple[Tensor, Tensor]:
    sequences, device = len(drafts.starts) - 1, drafts.starts.device
    accepted = torch.empty((sequences,), dtype=torch.int32, device=device)
    return accepted, torch.empty((sequences, drafts.longest + 1), dtype=torch.int64, device=device)


@triton.jit
def coupled_kernel(token_ids, starts, sampled, accepted, tokens, width, BLOCK: tl.constexpr):
    sequence = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    start, length = _span(starts, sequence)
    drafted = tl.load(token_ids + start + columns, columns < length, -1)
    own = tl.load(sampled + start + sequence + columns, columns <= length, -1)
    count = _agreeing(drafted == own, columns, length)
    tl.store(accepted + sequence, count)
    tl.store(tokens + sequence * width + columns, tl.where(columns <= count, own, -1), columns < width)


@triton.jit
def accept_kernel(
    token_ids, starts, target, draft, seeds, positions, accepted, tokens, target_stride, draft_stride, width,
    HAS_DRAFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many drafts are accepted. The token behind them is not known yet: its place gets -1."""
    sequence = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    start, length = _span(starts, sequence)
    inside = columns < length
    place, row = (start + columns).to(tl.int64), (start + sequence + columns).to(tl.int64)
    drafted = tl.load(token_ids + place, inside, -1)
    p = tl.load(target + row * target_stride + drafted, inside, 0.0)
    q = tl.full((BLOCK,), 1.0, tl.float32)
    if HAS_DRAFT:
        q = tl.load(draft + place * draft_stride + drafted, inside, 1.0)
    key = noise_key(tl.load(seeds + row, inside, 0), tl.load(positions + row, inside, 0))
    count = _agreeing(uniform(mixed(key)) * q.to(tl.float64) <= p.to(tl.float64), columns, length)
    tl.store(accepted + sequence, count)
    tl.store(tokens + sequence * width + columns, tl.where(columns < count, drafted, -1), columns < width)


@triton.jit(do_not_specialize=["num_tiles"])
def recover_kernel(
    token_ids, starts, target, draft, seeds, positions, accepted, scores, chosen,
    vocabulary, target_stride, draft_stride, num_tiles, HAS_DRAFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The best token of one program's tiles for the place behind the accepted drafts of one sequence."""
    sequence, program = tl.program_id(0), tl.program_id(1)
    start, length = _span(starts, sequence)
    count = tl.load(accepted + sequence)
    is_refused = count < length
    place, row = (start + count).to(tl.int64), (start + sequence + count).to(tl.int64)
    refused = tl.load(token_ids + place, is_refused, -1)
    key = mixed(noise_key(tl.load(seeds + row), tl.load(positions + row)) ^ 0xFFFFFFFFFFFFFFFF)
    best, best_token = tl.full((), float("-inf"), tl.float64), tl.full((), 0, tl.int32)
    unheated = tl.full((), 1.0, tl.float64)
    num_refusing = tl.where(is_refused, vocabulary, 0)  # behind a whole draft there is nothing to take off
    first = program * num_tiles
    for tile in range(first, tl.minimum(first + num_tiles, tl.cdiv(vocabulary, TILE))):
        tokens = tile * TILE + tl.arange(0, TILE)
        inside = tokens < vocabulary
        p = tl.load(target + row * target_stride + tokens, inside, 0.0)
        if HAS_DRAFT:
            residual = p - tl.load(draft + place * draft_stride + tokens, tokens < num_refusing, 0.0)
        else:
            residual = tl.where(tokens == refused, 0.0, p)
        values = tl.where(residual > 0, _log(residual), _log(p) + _LEFTOVER)
        best, best_token = race(best, best_token, values, tokens, unheated, key)
    tl.store(scores + sequence * tl.num_programs(1) + program, best)
    tl.store(chosen + sequence * tl.num_programs(1) + program, best_token)


@triton.jit
def _span(starts, sequence):
    start = tl.load(starts + sequence)
    return start, tl.load(starts + sequence + 1) - start


@triton.jit
def _agreeing(agrees, columns, length):
    """How many from the first on agree."""
    return tl.min(tl.where(agrees & (columns < length), length, tl.minimum(columns, length)), axis=0)


@triton.jit
def _log(values):
    return tl.where(values > 0, tl.log(tl.where(values > 0, values, 1.0)), float("-inf"))
