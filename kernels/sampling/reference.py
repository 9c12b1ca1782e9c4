"""Sampling in plain torch: the reference for the kernels.

A token's *rank* is a 64-bit integer that orders a row like a stable descending sort: a larger logit has a larger rank,
and among equal logits, the lower token id has the larger rank. Top-k, top-p and min-p each keep a prefix of that order,
which is "all ranks from a threshold on". The strictest of the three thresholds counts. Typical-p keeps tokens anywhere
in the order, so a threshold cannot express it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...protocol.sampling import MIN_TEMPERATURE
from .gumbel_noise import gumbel_noise, noise_keys
from .types import LOWEST_RANK, MAX_TOKENS, TOKEN_BITS, FlatEdits, LogitRows, Sampling, TopLogprobs, Truncation


def sample_reference(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the results of `ops.sample`."""
    logits = allowed_logits(logits, sampling)
    keys = noise_keys(sampling.seeds, sampling.positions)
    random = sampling.temperatures >= MIN_TEMPERATURE
    temperatures = torch.where(random, sampling.temperatures, 1.0)[:, None]
    noise = torch.where(random[:, None], gumbel_noise(keys, logits.shape[1]), 0.0)
    return (logits.double() / temperatures + noise).argmax(dim=-1)


def log_probabilities_reference(logits: Tensor, chosen: Tensor, num_top: int) -> TopLogprobs:
    """Return the results of `ops.log_probabilities`."""
    logprobs = logits.float().log_softmax(dim=-1)
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    picked = logprobs.gather(1, chosen[:, None]).flatten()
    return TopLogprobs(picked, values[:, :num_top].contiguous(), ids[:, :num_top].contiguous())


def apply_edits_reference_(logits: Tensor, edits: FlatEdits) -> None:
    """Edit logits in place like `ops.apply_edits_`."""
    real = edits.rows >= 0
    places = edits.rows[real].long(), edits.token_ids[real].long()
    values, divisors = logits[places], edits.divisors[real]
    logits[places] = torch.where(values > 0, values / divisors, values * divisors) + edits.offsets[real]


def allowed_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return a float32 copy with -inf for every token that mask, truncation or typical-p excludes."""
    logits = apply_token_bitmask(logits, sampling.mask)
    if sampling.truncation is not None:
        threshold = thresholds_reference(LogitRows(logits, sampling.temperatures, None), sampling.truncation)
        logits = logits.masked_fill(ranks(logits) < threshold[:, None], -torch.inf)
    if sampling.typical_p is not None:
        logits = typical_logits(logits, sampling.temperatures, sampling.typical_p)
    return logits


def thresholds_reference(rows: LogitRows, truncation: Truncation) -> Tensor:
    """Return the results of `ops.thresholds`, computed by sorting.

    A token is kept if its index in the sorted row is below k, if the tokens before it have a total probability below p,
    and if its own probability is at least min-p times the largest.
    """
    logits = apply_token_bitmask(rows.logits, rows.mask)
    ordered, order = ranks(logits).sort(dim=-1, descending=True)
    random = rows.temperatures >= MIN_TEMPERATURE
    scaled = logits.gather(1, order).double() / torch.where(random, rows.temperatures, 1.0)[:, None]
    outside = torch.zeros_like(ordered, dtype=torch.bool)
    if truncation.top_k is not None:
        top_k = truncation.top_k[:, None]
        outside |= (torch.arange(ordered.shape[1], device=ordered.device) >= top_k) & (top_k > 0)
    probabilities = scaled.masked_fill(outside, -torch.inf).softmax(dim=-1)
    if truncation.top_p is not None:
        top_p = truncation.top_p[:, None]
        outside |= (probabilities.cumsum(dim=-1) - probabilities >= top_p) & (top_p < 1)
    if truncation.min_p is not None:
        outside |= probabilities < truncation.min_p[:, None] * probabilities[:, :1]
    outside[:, 0] = False
    least = ordered.masked_fill(outside, torch.iinfo(torch.int64).max).amin(dim=-1)
    return torch.where(random, least, LOWEST_RANK)


def typical_logits(logits: Tensor, temperatures: Tensor, typical_p: Tensor) -> Tensor:
    """Apply typical-p (Meister et al. 2023): return `logits` (rows, vocab) float32 with -inf for untypical tokens.

    The typical tokens are those whose surprise, -log p, is nearest to the entropy, up to a total probability of
    `typical_p`. At equal distance, likelier tokens come first. `temperatures` and `typical_p` are (rows,) float64.
    Greedy rows and rows with a `typical_p` of 1 keep all tokens.
    """
    random = temperatures >= MIN_TEMPERATURE
    order = ranks(logits).argsort(dim=-1, descending=True)
    scaled = logits.gather(1, order).double() / torch.where(random, temperatures, 1.0)[:, None]
    logprobs = scaled.log_softmax(dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).nan_to_num(0.0).sum(dim=-1, keepdim=True)
    nearest = (logprobs + entropy).abs().argsort(dim=-1, stable=True)
    mass = probabilities.gather(1, nearest)
    excluded = mass.cumsum(dim=-1) - mass >= torch.where(random & (typical_p < 1), typical_p, 2.0)[:, None]
    excluded[:, 0] = False
    return logits.masked_fill(torch.zeros_like(excluded).scatter(1, order.gather(1, nearest), excluded), -torch.inf)


def ranks(logits: Tensor) -> Tensor:
    """Return the ranks of float32 logits (rows, vocab), int64.

    The bits of positive floats, read as integers, have the order of the floats; those of negative floats have the
    reverse order, which flipping the bits corrects. Both zeros are equal.
    """
    bits = (logits + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    return (ordered.long() << TOKEN_BITS) + (MAX_TOKENS - 1 - tokens)


def apply_token_bitmask(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return the logits in float32, -inf for tokens whose mask bit is 0."""
    logits = logits.float()
    if mask is None:
        return logits
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
