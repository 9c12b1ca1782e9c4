"""Paged attention as one reads it in a textbook: a loop over sequences, in float32. What the kernel is checked against.

(`paged_attention` is the fast one for the CPU; it knows neither soft caps nor FP8 caches.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .types import QuerySpan


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """What one layer makes of query times key. `window` counts tokens, the query's own included; None is all of them.

    `soft_cap`: scores become soft_cap * tanh(score / soft_cap) (Gemma 2). What the cache holds is the keys over
    `key_scale` and the values over `value_scale`.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0


def attend_reference(query: Tensor, cache: Tensor, spans: Sequence[QuerySpan], rule: ScoreRule) -> Tensor:
    """`query` (rows, heads, head_dim), `cache` (blocks, block_size, 2 * kv_heads, head_dim), keys then values.

    Returns float32, zeros for rows behind those of the spans.
    """
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    row = 0
    for span in spans:
        rows = slice(row, row + span.length)
        out[rows] = _attend_sequence(query[rows].float(), cache, span, rule)
        row += span.length
    return out


def _attend_sequence(query: Tensor, cache: Tensor, span: QuerySpan, rule: ScoreRule) -> Tensor:
    end = span.start + span.length
    blocks = torch.tensor(span.block_table, dtype=torch.int64, device=cache.device)
    tokens = cache[blocks].float().flatten(0, 1)[:end]
    kv_heads = cache.shape[2] // 2
    shared = query.shape[1] // kv_heads
    keys = (tokens[:, :kv_heads] * rule.key_scale).repeat_interleave(shared, dim=1)
    values = (tokens[:, kv_heads:] * rule.value_scale).repeat_interleave(shared, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * rule.scale
    if rule.soft_cap is not None:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    positions = torch.arange(span.start, end, device=query.device)[:, None]
    key_positions = torch.arange(end, device=query.device)
    hidden = key_positions > positions
    if rule.window is not None:
        hidden |= key_positions <= positions - rule.window
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", probabilities, values)
