"""Textbook paged attention in float32, one sequence at a time: the reference for the kernels.

Unlike `torch_attention`, it supports FP8 caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from updraft.kernels.attention.types import QuerySpan, ScoreOptions


def attend_reference(query: Tensor, cache: Tensor, spans: Sequence[QuerySpan], options: ScoreOptions) -> Tensor:
    """Attend with `query` (rows, heads, head_dim) to the sequence of each span. Returns float32 of the same shape.

    `cache` is (blocks, block_size, 2 * kv_heads, head_dim), keys before values. Rows after the spans get zeros.
    """
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    row = 0
    for span in spans:
        rows = slice(row, row + span.length)
        out[rows] = _attend_sequence(query[rows].float(), cache, span, options)
        row += span.length
    return out


def _attend_sequence(query: Tensor, cache: Tensor, span: QuerySpan, options: ScoreOptions) -> Tensor:
    end = span.start + span.length
    blocks = torch.tensor(span.block_table, dtype=torch.int64, device=cache.device)
    tokens = cache[blocks].float().flatten(0, 1)[:end]
    kv_heads = cache.shape[2] // 2
    shared = query.shape[1] // kv_heads
    keys = (tokens[:, :kv_heads] * options.key_scale).repeat_interleave(shared, dim=1)
    values = (tokens[:, kv_heads:] * options.value_scale).repeat_interleave(shared, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * options.scale
    positions = torch.arange(span.start, end, device=query.device)[:, None]
    key_positions = torch.arange(end, device=query.device)
    hidden = key_positions > positions
    if options.window is not None:
        hidden |= key_positions <= positions - options.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if options.sinks is not None:
        scores = torch.cat((scores, options.sinks[:, None, None].expand(-1, span.length, 1)), dim=-1)
    probabilities = scores.softmax(dim=-1)[..., :end]
    return torch.einsum("hqk,khd->qhd", probabilities, values)
