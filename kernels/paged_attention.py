"""Attention over a paged KV cache in plain torch: what runs on the CPU and what device kernels are checked against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_SHORT_QUERY = 16  # rows up to this long (decode, draft verification) share one padded call


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """The rows of one sequence in a ragged batch: positions `start` to `start + length - 1`."""

    start: int
    length: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences computed in one padded call.

    `rows` (sequences, queries) int64: flattened token row of each query, padding points at row 0 of the group.
    `blocks` (sequences, blocks) int64: block tables padded with block 0. `mask` (sequences, 1, queries, keys) bool.
    `kept` (rows,) int64: flattened (sequence, query) index of each real row; None if nothing is padding.
    """

    rows: Tensor
    blocks: Tensor
    mask: Tensor
    kept: Tensor | None

    def to(self, device: torch.device) -> AttentionGroup:
        kept = None if self.kept is None else self.kept.to(device)
        return AttentionGroup(self.rows.to(device), self.blocks.to(device), self.mask.to(device), kept)


class PagedAttention:
    """One forward pass's attention over `cache` (layers, 2, blocks, block_size, kv_heads, head_dim)."""

    def __init__(self, cache: Tensor, spans: Sequence[QuerySpan], slot_mapping: Tensor) -> None:
        self._cache = cache
        self._slots = slot_mapping
        self._groups = [group.to(cache.device) for group in plan(spans, cache.shape[3])]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._cache[layer]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, self._slots, key)
        values.view(-1, *values.shape[2:]).index_copy_(0, self._slots, value)
        if len(self._groups) == 1 and self._groups[0].kept is None:
            return _attend_group(self._groups[0], query, keys, values)
        out = torch.empty_like(query)
        for group in self._groups:
            mixed = _attend_group(group, query, keys, values)
            rows = group.rows.flatten()
            out[rows if group.kept is None else rows[group.kept]] = mixed
        return out


def plan(spans: Sequence[QuerySpan], block_size: int) -> list[AttentionGroup]:
    """Short queries of similar key length share a group; every long one (a prefill chunk) is its own.

    Similar: the same power of two of blocks, so that padding at most doubles the keys read.
    """
    grouped: dict[int, list[tuple[int, QuerySpan]]] = {}
    row = 0
    for index, span in enumerate(spans):
        blocks = -(-(span.start + span.length) // block_size)
        group = blocks.bit_length() if span.length <= _SHORT_QUERY else -1 - index
        grouped.setdefault(group, []).append((row, span))
        row += span.length
    return [_build_group(members, block_size) for members in grouped.values()]


def _build_group(members: list[tuple[int, QuerySpan]], block_size: int) -> AttentionGroup:
    queries = max(span.length for _, span in members)
    num_blocks = max(-(-(span.start + span.length) // block_size) for _, span in members)
    first = torch.tensor([row for row, _ in members])
    starts = torch.tensor([span.start for _, span in members])
    lengths = torch.tensor([span.length for _, span in members])
    offsets = torch.arange(queries)
    real = offsets < lengths[:, None]
    rows = torch.where(real, first[:, None] + offsets, first[:, None])
    tables = [[*span.block_table[:num_blocks], *[0] * (num_blocks - len(span.block_table))] for _, span in members]
    last_visible = starts[:, None] + torch.where(real, offsets, 0)
    mask = torch.arange(num_blocks * block_size) <= last_visible[:, :, None]
    kept = None if bool(real.all()) else real.flatten().nonzero().flatten()
    return AttentionGroup(rows, torch.tensor(tables), mask[:, None], kept)


def _attend_group(group: AttentionGroup, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Mixed values of the group's real rows: (rows, heads, head_dim).

    The query heads that share a KV head are folded into the query dimension, so keys are never repeated.
    """
    sequences, queries = group.rows.shape
    kv_heads, head_dim = keys.shape[2:]
    shared = query.shape[1] // kv_heads
    length = group.blocks.shape[1] * keys.shape[1]
    gathered_keys = keys[group.blocks].view(sequences, length, kv_heads, head_dim).transpose(1, 2)
    gathered_values = values[group.blocks].view(sequences, length, kv_heads, head_dim).transpose(1, 2)
    folded = query[group.rows].view(sequences, queries, kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(
        folded.reshape(sequences, kv_heads, shared * queries, head_dim),
        gathered_keys,
        gathered_values,
        attn_mask=group.mask.repeat(1, 1, shared, 1),
    )
    mixed = mixed.view(sequences, kv_heads, shared, queries, head_dim).permute(0, 3, 1, 2, 4)
    flat = mixed.reshape(sequences * queries, kv_heads * shared, head_dim)
    return flat if group.kept is None else flat[group.kept]
