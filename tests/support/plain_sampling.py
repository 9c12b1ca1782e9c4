"""Plain torch reference of sampling and logit edits, which sorts whole rows and recounts all tokens.

Served requests must get exactly the tokens of this reference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from updraft.cloud_engine.engine.worker import sampler
from updraft.cloud_engine.engine.worker.sampler import SamplingRows, packed_options
from updraft.protocol.sampling import MIN_TEMPERATURE, WORD, ResolvedParams, noise_key
from updraft.text.grammars.state import Mask
from updraft.text.logit_edits import LogitEdits


class SamplingRow(NamedTuple):
    """The sampling parameters of one row of logits, for the token at `position` of its sequence."""

    seed: int
    position: int
    params: ResolvedParams
    edits: LogitEdits | None = None
    # Tokens that the grammar allows; None allows all.
    mask: Mask | None = None


def sampling_rows(rows: Sequence[SamplingRow]) -> SamplingRows:
    return SamplingRows(
        packed_options([row.params for row in rows], [row.seed for row in rows]),
        np.array([row.position for row in rows], np.int64),
        {index: row.mask for index, row in enumerate(rows) if row.mask is not None},
        {index: row.edits for index, row in enumerate(rows) if row.edits is not None},
    )


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Sample as the engine does."""
    return sampler.sample(logits, sampling_rows(rows)).tolist()


def edits_of(token_ids: Sequence[int], divisors: Sequence[float], offsets: Sequence[float]) -> LogitEdits:
    return LogitEdits(np.array(token_ids, np.int32), np.array(divisors, np.float32), np.array(offsets, np.float32))


def plain_edits(
    params: ResolvedParams, prompt: Sequence[int], answer: Sequence[int], end_ids: Iterable[int]
) -> LogitEdits | None:
    """Return the logit edits for the token after `answer`; None if no logit changes."""
    if not params.edits:
        return None
    repetition = params.repetition_penalty
    held_open = frozenset(end_ids) if len(answer) < params.min_tokens else frozenset[int]()
    penalised = params.frequency_penalty != 0 or params.presence_penalty != 0
    counts = Counter(answer) if penalised else Counter[int]()
    repeated = frozenset((*prompt, *answer)) if repetition != 1 else frozenset[int]()
    bias = dict(params.logit_bias)
    token_ids = sorted({*counts, *repeated, *bias, *held_open})
    if not token_ids:
        return None

    def offset(token: int) -> float:
        if token in held_open:
            return -inf
        count = counts[token]
        return bias.get(token, 0.0) - params.frequency_penalty * count - params.presence_penalty * (count > 0)

    divisors = [repetition if token in repeated else 1.0 for token in token_ids]
    return edits_of(token_ids, divisors, [offset(token) for token in token_ids])


def plain_sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Return a token per row of `logits` (rows, vocab) float32, without changing `logits`. Temperature 0 is argmax."""
    if any(row.mask is not None for row in rows):
        logits = _masked(logits, rows)
    if any(row.edits for row in rows):
        logits = _edited(logits, rows)
    chosen = logits.argmax(dim=-1)
    random = [index for index, row in enumerate(rows) if row.params.temperature >= MIN_TEMPERATURE]
    if random:
        sampled = _draw(logits[random], [rows[index] for index in random])
        chosen[torch.tensor(random, device=logits.device)] = sampled
    return chosen.tolist()


def _masked(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return a copy in which every token that the row's mask forbids is -inf."""
    masked = [index for index, row in enumerate(rows) if row.mask is not None]
    words = torch.from_numpy(np.stack([row.mask for row in rows if row.mask is not None])).to(logits.device)
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[-1]].bool()
    logits = logits.clone()
    logits[masked] = logits[masked].masked_fill(~allowed, -torch.inf)
    return logits


def _edited(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Return a copy with penalties, biases and bans applied."""
    logits = logits.clone()
    for index, row in enumerate(rows):
        if row.edits is None:
            continue
        ids, divisors, offsets = (
            torch.from_numpy(values) for values in (row.edits.token_ids, row.edits.divisors, row.edits.offsets)
        )
        chosen = logits[index, ids]
        logits[index, ids] = torch.where(chosen > 0, chosen / divisors, chosen * divisors) + offsets
    return logits


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    temperatures = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64, device=logits.device)
    scaled = logits.double() / temperatures[:, None]
    truncated = [index for index, row in enumerate(rows) if row.params.truncates]
    if truncated:
        scaled[truncated] = _truncate(scaled[truncated], [rows[index] for index in truncated])
    return (scaled + _gumbel(rows, logits.shape[-1], logits.device)).argmax(dim=-1)


def _truncate(scaled: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Set tokens outside top-k, then top-p, min-p and typical-p to -inf. At least one token always stays."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=scaled.dtype, device=scaled.device)[:, None]

    params = [row.params for row in rows]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    vocabulary = scaled.shape[-1]
    rank = torch.arange(vocabulary, device=scaled.device)
    outside = rank >= column([row.top_k or vocabulary for row in params])
    probabilities = ordered.masked_fill(outside, -torch.inf).softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    outside |= mass_before >= column([row.top_p if row.top_p < 1 else 2.0 for row in params])
    outside |= probabilities < column([row.min_p for row in params]) * probabilities[:, :1]
    outside[:, 0] = False
    if any(row.typical_p < 1 for row in params):
        outside |= _untypical(ordered.masked_fill(outside, -torch.inf), column([row.typical_p for row in params]))
    return scaled.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)


def _untypical(scaled: Tensor, typical_p: Tensor) -> Tensor:
    """Return a mask of the tokens that typical-p removes.

    Tokens stay in order of the distance between their surprise and the entropy, up to the mass `typical_p`.
    """
    logprobs = scaled.log_softmax(dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).nan_to_num(0.0).sum(dim=-1, keepdim=True)
    order = (logprobs + entropy).abs().argsort(dim=-1, stable=True)
    sorted_mass = probabilities.gather(1, order)
    mass_before = sorted_mass.cumsum(dim=-1) - sorted_mass
    beyond = mass_before >= torch.where(typical_p < 1, typical_p, 2.0)
    beyond[:, 0] = False
    return torch.zeros_like(beyond).scatter(1, order, beyond)


def _gumbel(rows: Sequence[SamplingRow], vocabulary: int, device: torch.device) -> Tensor:
    """Return standard Gumbel noise (rows, vocabulary) float64, a pure function of seed, position and token id."""
    keys = [noise_key(row.seed, row.position) for row in rows]
    signed = [key - WORD if key >= WORD // 2 else key for key in keys]
    counters = torch.arange(1, vocabulary + 1, device=device) * -0x61C8864680B583EB  # 2**64 / golden ratio, signed
    bits = _mix_tensor(torch.tensor(signed, device=device)[:, None] + counters)
    uniform = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _mix_tensor(words: Tensor) -> Tensor:
    """Apply `sampling_noise.mix` to int64 tensors, whose products wrap around."""
    words = (words ^ _shift_right(words, 30)) * -0x40A7B892E31B1A47
    words = (words ^ _shift_right(words, 27)) * -0x6B2FB644ECCEEE15
    return words ^ _shift_right(words, 31)


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Shift logically; torch's own shift keeps the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
