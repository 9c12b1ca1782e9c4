"""From logits to tokens.

Sampling is Gumbel-max: argmax(logits / temperature + noise) draws from softmax(logits / temperature). The noise of a
token depends on the request's seed, the token's position and its id, and on nothing else. So a seed gives the same
tokens whatever else is in the batch, and a draft token can be verified by asking whether it is the very token that
would have been sampled: the output with a draft is then the output without one, not only equal in distribution.
"""

# torch leaves `Tensor.tolist` untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from ...kernels.backend import uses_triton
from ...protocol.noise import WORD, noise_key
from ...protocol.sampling import LEAST_TEMPERATURE, SamplingParams
from ...text.grammar_state import Mask
from ...text.logit_edits import LogitEdits
from .device_sampler import can_sample, sample_on_device
from .request import TokenLogprob


class SamplingRow(msgspec.Struct, frozen=True, gc=False):
    """How to sample one row of logits. `position` is the index in the sequence of the token to be sampled.

    `mask`: the tokens that a grammar allows; None for all.
    """

    temperature: float
    seed: int
    position: int
    params: SamplingParams
    edits: LogitEdits | None = None
    mask: Mask | None = None


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """One token per row of `logits` (rows, vocab) float32, which stay as they are. Rows at temperature 0 are argmax."""
    if uses_triton(logits) and can_sample(rows):
        return sample_on_device(logits, rows)
    if any(row.mask is not None for row in rows):
        logits = _masked(logits, rows)
    if any(row.edits for row in rows):
        logits = _edited(logits, rows)
    chosen = logits.argmax(dim=-1)
    random = [index for index, row in enumerate(rows) if row.temperature >= LEAST_TEMPERATURE]
    if random:
        drawn = _draw(logits[random], [rows[index] for index in random])
        chosen[torch.tensor(random, device=logits.device)] = drawn
    return chosen.tolist()


def log_probabilities(logits: Tensor, chosen: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Raw log-probability of each row's chosen token and of its `num_top` most likely ones."""
    logprobs = logits.log_softmax(dim=-1)
    picked = logprobs.gather(1, torch.tensor(chosen, device=logits.device)[:, None]).flatten().tolist()
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    ids, values = top.indices.tolist(), top.values.tolist()
    return [
        TokenLogprob(logprob, tuple(zip(row_ids, row_values, strict=True)))
        for logprob, row_ids, row_values in zip(picked, ids, values, strict=True)
    ]


def _masked(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """A copy with every token at -inf that a row's mask does not allow."""
    masked = [index for index, row in enumerate(rows) if row.mask is not None]
    words = torch.from_numpy(np.stack([row.mask for row in rows if row.mask is not None])).to(logits.device)
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    allowed = bits.flatten(1)[:, : logits.shape[-1]].bool()
    logits = logits.clone()
    logits[masked] = logits[masked].masked_fill(~allowed, -torch.inf)
    return logits


def _edited(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """A copy with penalties, biases and bans applied."""
    logits = logits.clone()
    for index, row in enumerate(rows):
        if row.edits is None:
            continue
        ids, divisors, offsets = (
            torch.tensor(values, device=logits.device)
            for values in (row.edits.token_ids, row.edits.divisors, row.edits.offsets)
        )
        found = logits[index, ids]
        logits[index, ids] = torch.where(found > 0, found / divisors, found * divisors) + offsets
    return logits


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    temperatures = torch.tensor([row.temperature for row in rows], dtype=torch.float64, device=logits.device)
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
    """Tokens beyond the `typical_p` mass of those whose surprise is nearest to the distribution's entropy."""
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
    """Standard Gumbel noise (rows, vocabulary) float64, a pure function of (seed, position, token id)."""
    keys = [noise_key(row.seed, row.position) for row in rows]
    signed = [key - WORD if key >= WORD // 2 else key for key in keys]
    counters = torch.arange(1, vocabulary + 1, device=device) * -0x61C8864680B583EB  # 2**64 / golden ratio, signed
    bits = _mix_tensor(torch.tensor(signed, device=device)[:, None] + counters)
    uniform = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _mix_tensor(words: Tensor) -> Tensor:
    """`noise.mix` on int64 tensors, whose products wrap around."""
    words = (words ^ _shift_right(words, 30)) * -0x40A7B892E31B1A47
    words = (words ^ _shift_right(words, 27)) * -0x6B2FB644ECCEEE15
    return words ^ _shift_right(words, 31)


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
