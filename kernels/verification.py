"""Speculative verification of a ragged batch of drafts: how much of each the target confirms, and what follows it.

Two rules, both lossless. *Coupled* (`verify_coupled`) is the engine's own: the target samples a token at every position
with the noise of that position, and a draft is accepted as long as it is what was sampled; the output is the very one
without a draft. *Rejection* (`verify_by_rejection`; Leviathan et al. 2023, Chen et al. 2023) accepts a draft token x
with probability min(1, p(x) / q(x)), and draws one from the normalised max(p - q, 0) where it refuses, so the output
has the distribution p; it accepts more than coupling does where a draft is sampled with noise of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..protocol.errors import ConfigurationError
from .backend import uses_triton
from .noise import gumbel_noise, noise_keys, recovery_keys, uniforms

#: Added to log p where nothing of p - q is left, so that such a token is drawn only if that holds for all.
LEFTOVER = -100.0


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens of all sequences, one after the other: `token_ids` (total,) int64.

    Those of sequence i are at `starts[i]` to `starts[i + 1] - 1`, `starts` (sequences + 1,) int32, at most `longest`.
    The target has one row more for each sequence, so its rows of sequence i begin at `starts[i] + i`.
    """

    token_ids: Tensor
    starts: Tensor
    longest: int


class Verified(NamedTuple):
    """`accepted` (sequences,) int32, and the new `tokens` (sequences, longest + 1) int64, -1 behind the last one.

    The new tokens are the accepted drafts and one of the target's own.
    """

    accepted: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True)
class Chances:
    """What rejection sampling decides by; rows as in `Drafts`.

    `target` (total + sequences, vocab) and `draft` (total, vocab) float32: the probabilities that each samples from,
    truncation included (`probabilities`). `draft` None: its tokens were certain (n-grams, a prediction). `seeds` and
    `positions` (total + sequences,) int64, the position being the index in its sequence of the token to be decided.
    """

    target: Tensor
    draft: Tensor | None
    seeds: Tensor
    positions: Tensor


def verify_coupled(drafts: Drafts, sampled: Tensor) -> Verified:
    """Accept drafts as long as they are what the target `sampled` (total + sequences,) int64 in their place."""
    _check(drafts)
    if uses_triton(sampled):
        from .verification_triton import launch_verify_coupled

        return launch_verify_coupled(drafts, sampled)
    return reference_verify_coupled(drafts, sampled)


def verify_by_rejection(drafts: Drafts, chances: Chances) -> Verified:
    """Accept drafts by chance, and draw what follows them from the rest of the target's distribution."""
    _check(drafts)
    if chances.target.stride(1) != 1 or (chances.draft is not None and chances.draft.stride(1) != 1):
        raise ConfigurationError("verify_by_rejection: probabilities must be dense rows.")
    if uses_triton(chances.target):
        from .verification_triton import launch_verify_by_rejection

        return launch_verify_by_rejection(drafts, chances)
    return reference_verify_by_rejection(drafts, chances)


def reference_verify_coupled(drafts: Drafts, sampled: Tensor) -> Verified:
    places, rows, lengths = _layout(drafts)
    agrees = _padded(drafts.token_ids, places) == _padded(sampled, rows)[:, :-1]
    accepted = _agreeing(agrees, lengths)
    columns = torch.arange(drafts.longest + 1, device=sampled.device)
    tokens = _padded(sampled, rows).masked_fill(columns > accepted[:, None], -1)
    return Verified(accepted.int(), tokens)


def reference_verify_by_rejection(drafts: Drafts, chances: Chances) -> Verified:
    places, rows, lengths = _layout(drafts)
    keys = noise_keys(chances.seeds, chances.positions)
    of_draft = torch.arange(len(drafts.token_ids), device=keys.device)
    row_of = torch.zeros_like(of_draft).scatter_(0, places[places >= 0], rows[:, :-1][places >= 0])
    p = chances.target[row_of, drafts.token_ids]
    q = torch.ones_like(p) if chances.draft is None else chances.draft[of_draft, drafts.token_ids]
    agrees = uniforms(keys[row_of], torch.zeros_like(row_of)) * q <= p
    accepted = _agreeing(_padded(agrees.long(), places) == 1, lengths)
    own = drafts.starts[:-1].long() + torch.arange(len(lengths), device=keys.device) + accepted
    refused = accepted < lengths
    place = (drafts.starts[:-1].long() + accepted)[refused]
    residual = chances.target[own].clone()
    if chances.draft is None:
        residual[refused.nonzero().flatten(), drafts.token_ids[place]] = 0
    else:
        residual[refused] = (residual[refused] - chances.draft[place]).clamp(min=0)
    scores = torch.where(residual > 0, residual.log(), chances.target[own].log() + LEFTOVER).double()
    last = (scores + gumbel_noise(recovery_keys(keys[own]), scores.shape[1])).argmax(dim=-1)
    columns = torch.arange(drafts.longest + 1, device=keys.device)
    drafted = torch.nn.functional.pad(_padded(drafts.token_ids, places), (0, 1), value=-1)
    tokens = torch.where(columns < accepted[:, None], drafted, -1)
    return Verified(accepted.int(), torch.where(columns == accepted[:, None], last[:, None], tokens))


def _layout(drafts: Drafts) -> tuple[Tensor, Tensor, Tensor]:
    """Of each sequence: places of its drafts and rows of the target, (sequences, longest [+ 1]), -1 behind the last."""
    starts = drafts.starts.long()
    lengths = starts[1:] - starts[:-1]
    columns = torch.arange(drafts.longest + 1, device=starts.device)
    places = starts[:-1, None] + columns
    rows = places + torch.arange(len(lengths), device=starts.device)[:, None]
    places = places.masked_fill(columns >= lengths[:, None], -1)[:, :-1]
    return places, rows.masked_fill(columns > lengths[:, None], -1), lengths


def _padded(values: Tensor, places: Tensor) -> Tensor:
    """The values at `places`; -1 at place -1."""
    behind = torch.cat((values, values.new_full((1,), -1)))
    return behind[places]


def _agreeing(agrees: Tensor, lengths: Tensor) -> Tensor:
    """How many drafts from the first on agree."""
    within = torch.arange(agrees.shape[1], device=agrees.device) < lengths[:, None]
    return (agrees & within).long().cumprod(dim=1).sum(dim=1)


def _check(drafts: Drafts) -> None:
    if drafts.starts.dtype != torch.int32 or drafts.starts.dim() != 1 or drafts.token_ids.dtype != torch.int64:
        raise ConfigurationError("Drafts are int64 token ids with int32 starts.")
