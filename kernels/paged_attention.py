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
class LayerAttention:
    """What one layer asks of attention: its place in the cache, the factor of its scores, and how far back it sees.

    `window` counts tokens, the query's own included; None is all of them.
    """

    index: int
    scale: float
    window: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences computed in one padded call.

    `rows` (sequences * queries,) int64: row of each query in the ragged batch, padding repeats the sequence's first.
    `blocks` (sequences * blocks,) int64: the blocks in reach, padded with block 0. `mask` (sequences, 1,
    shared * queries, keys) float: 0 where a query may look, -inf elsewhere; `shared` query heads read the same KV head.
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
    value go: block * block_size + offset. `shared` query heads read the same KV head.
    """

    def __init__(self, cache: Tensor, spans: Sequence[QuerySpan], slot_mapping: Tensor, shared: int) -> None:
        self._cache = cache
        self._spans = spans
        self._slots = slot_mapping
        self._shared = shared
        self._groups_of: dict[int | None, list[AttentionGroup]] = {}

    def attend(self, layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store `key` and `value` (rows, kv_heads, head_dim), attend causally with `query` (rows, heads, head_dim)."""
        keys, values = self._cache[layer.index]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, self._slots, key)
        values.view(-1, *values.shape[2:]).index_copy_(0, self._slots, value)
        groups = self._groups(layer.window)
        if len(groups) == 1 and groups[0].kept is None:  # a pure decode batch: nothing to rearrange
            return _attend_group(groups[0], layer.scale, query, keys, values)
        out = torch.empty_like(query)
        for group in groups:
            mixed = _attend_group(group, layer.scale, query.index_select(0, group.rows), keys, values)
            rows = group.rows
            if group.kept is not None:
                mixed, rows = mixed.index_select(0, group.kept), rows.index_select(0, group.kept)
            out.index_copy_(0, rows, mixed)
        return out

    def _groups(self, window: int | None) -> list[AttentionGroup]:
        """The plan of all layers with this window, made when the first of them asks."""
        if window not in self._groups_of:
            self._groups_of[window] = _plan(self._spans, window, self._cache, self._shared)
        return self._groups_of[window]


@dataclass(frozen=True, slots=True)
class _Reach:
    """A span whose first row is `row`, and the blocks its queries can see: `first` to `end - 1` of its table."""

    row: int
    span: QuerySpan
    first: int
    end: int


def _plan(spans: Sequence[QuerySpan], window: int | None, cache: Tensor, shared: int) -> list[AttentionGroup]:
    """Short queries of similar key length share a group; every long one (a prefill chunk) is its own.

    Similar: the same power of two of blocks, so that padding at most doubles the keys read.
    """
    block_size = cache.shape[3]
    grouped: dict[int, list[_Reach]] = {}
    row = 0
    for index, span in enumerate(spans):
        oldest = 0 if window is None else max(0, span.start - window + 1)
        reach = _Reach(row, span, oldest // block_size, -(-(span.start + span.length) // block_size))
        size = (reach.end - reach.first).bit_length() if span.length <= _SHORT_QUERY else -1 - index
        grouped.setdefault(size, []).append(reach)
        row += span.length
    return [_build_group(members, window, cache, shared) for members in grouped.values()]


def _build_group(members: list[_Reach], window: int | None, cache: Tensor, shared: int) -> AttentionGroup:
    block_size = cache.shape[3]
    queries = max(member.span.length for member in members)
    num_blocks = max(member.end - member.first for member in members)
    first_row = torch.tensor([member.row for member in members])[:, None]
    starts = torch.tensor([member.span.start for member in members])[:, None]
    first_key = torch.tensor([member.first * block_size for member in members])[:, None, None]
    real = torch.arange(queries) < torch.tensor([member.span.length for member in members])[:, None]
    offsets = torch.arange(queries) * real  # padding repeats the first query
    positions = (starts + offsets)[:, :, None]
    keys = first_key + torch.arange(num_blocks * block_size)
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    tables = [_padded(member.span.block_table[member.first : member.end], num_blocks) for member in members]
    mask = torch.zeros(hidden.shape, dtype=cache.dtype).masked_fill(hidden, -torch.inf)
    kept = None if bool(real.all()) else real.flatten().nonzero().flatten().to(cache.device)
    return AttentionGroup(
        sequences=len(members),
        queries=queries,
        rows=(first_row + offsets).flatten().to(cache.device),
        blocks=torch.tensor(tables).flatten().to(cache.device),
        mask=mask[:, None].repeat(1, 1, shared, 1).to(cache.device),
        kept=kept,
    )


def _padded(blocks: Sequence[int], length: int) -> list[int]:
    return [*blocks, *[0] * (length - len(blocks))]


def _attend_group(group: AttentionGroup, scale: float, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
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
        scale=scale,
    )
    unfolded = mixed.view(group.sequences, kv_heads, heads // kv_heads, group.queries, head_dim).permute(0, 3, 1, 2, 4)
    return unfolded.reshape(-1, heads, head_dim)
