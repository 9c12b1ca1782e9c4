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

    `rows` (sequences * queries,) int64: row of each query in the ragged batch, padding repeats the sequence's first.
    `blocks` (sequences * blocks,) int64: block tables, padded with block 0. `mask` (sequences, 1, shared * queries,
    keys) float: 0 where a query may look, -inf elsewhere; `shared` query heads read the same KV head.
    `kept` int64: which entries of `rows` are no padding; None if all are.
    """

    sequences: int
    queries: int
    rows: Tensor
    blocks: Tensor
    mask: Tensor
    kept: Tensor | None


class PagedAttention:
    """One forward pass's attention over `cache` (layers, 2, blocks, block_size, kv_heads, head_dim).

    `spans` are the sequences in the order of their rows; `slot_mapping` (rows,) int64 says where each row's key and
    value go: block * block_size + offset.
    """

    def __init__(self, cache: Tensor, spans: Sequence[QuerySpan], slot_mapping: Tensor, shared: int) -> None:
        self._cache = cache
        self._slots = slot_mapping
        self._groups = _plan(spans, cache, shared)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store `key` and `value` (rows, kv_heads, head_dim), attend causally with `query` (rows, heads, head_dim)."""
        keys, values = self._cache[layer]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, self._slots, key)
        values.view(-1, *values.shape[2:]).index_copy_(0, self._slots, value)
        if len(self._groups) == 1 and self._groups[0].kept is None:  # a pure decode batch: nothing to rearrange
            return _attend_group(self._groups[0], query, keys, values)
        out = torch.empty_like(query)
        for group in self._groups:
            mixed = _attend_group(group, query.index_select(0, group.rows), keys, values)
            rows = group.rows
            if group.kept is not None:
                mixed, rows = mixed.index_select(0, group.kept), rows.index_select(0, group.kept)
            out.index_copy_(0, rows, mixed)
        return out


def _plan(spans: Sequence[QuerySpan], cache: Tensor, shared: int) -> list[AttentionGroup]:
    """Short queries of similar key length share a group; every long one (a prefill chunk) is its own.

    Similar: the same power of two of blocks, so that padding at most doubles the keys read.
    """
    block_size = cache.shape[3]
    grouped: dict[int, list[tuple[int, QuerySpan]]] = {}
    row = 0
    for index, span in enumerate(spans):
        size = _blocks(span, block_size).bit_length() if span.length <= _SHORT_QUERY else -1 - index
        grouped.setdefault(size, []).append((row, span))
        row += span.length
    return [_build_group(members, cache, shared) for members in grouped.values()]


def _build_group(members: list[tuple[int, QuerySpan]], cache: Tensor, shared: int) -> AttentionGroup:
    block_size = cache.shape[3]
    queries = max(span.length for _, span in members)
    num_blocks = max(_blocks(span, block_size) for _, span in members)
    first = torch.tensor([row for row, _ in members])[:, None]
    starts = torch.tensor([span.start for _, span in members])[:, None]
    real = torch.arange(queries) < torch.tensor([span.length for _, span in members])[:, None]
    offsets = torch.arange(queries) * real  # padding repeats the first query
    tables = [[*span.block_table[:num_blocks], *[0] * (num_blocks - len(span.block_table))] for _, span in members]
    hidden = torch.arange(num_blocks * block_size) > (starts + offsets)[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=cache.dtype).masked_fill(hidden, -torch.inf)
    kept = None if bool(real.all()) else real.flatten().nonzero().flatten().to(cache.device)
    return AttentionGroup(
        sequences=len(members),
        queries=queries,
        rows=(first + offsets).flatten().to(cache.device),
        blocks=torch.tensor(tables).flatten().to(cache.device),
        mask=mask[:, None].repeat(1, 1, shared, 1).to(cache.device),
        kept=kept,
    )


def _blocks(span: QuerySpan, block_size: int) -> int:
    return -(-(span.start + span.length) // block_size)


def _attend_group(group: AttentionGroup, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`query` (sequences * queries, heads, head_dim) attends over its blocks; same shape out.

    Query heads that share a KV head are folded into the query dimension, so keys are never repeated.
    """
    kv_heads, head_dim = keys.shape[2:]
    heads = query.shape[1]
    folded = query.view(group.sequences, group.queries, kv_heads, heads // kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(
        folded.reshape(group.sequences, kv_heads, -1, head_dim),
        keys.index_select(0, group.blocks).view(group.sequences, -1, kv_heads, head_dim).transpose(1, 2),
        values.index_select(0, group.blocks).view(group.sequences, -1, kv_heads, head_dim).transpose(1, 2),
        attn_mask=group.mask,
    )
    unfolded = mixed.view(group.sequences, kv_heads, heads // kv_heads, group.queries, head_dim).permute(0, 3, 1, 2, 4)
    return unfolded.reshape(-1, heads, head_dim)
