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
    """One forward pass's attention over `cache` (layers, blocks, block_size, 2 * kv_heads, head_dim), keys then values.

    `spans` are the sequences in the order of their rows; `slot_mapping` (rows,) int64 says where each row's key and
    value go: block * block_size + offset. `shared` query heads read the same KV head. `batch_invariant`: what a row
    gets does not depend, to the last bit, on what else is computed with it (see `_aligned`).
    """

    def __init__(
        self,
        cache: Tensor,
        spans: Sequence[QuerySpan],
        slot_mapping: Tensor,
        *,
        shared: int,
        batch_invariant: bool = False,
    ) -> None:
        self._cache = cache
        self._spans = spans
        self._slots = slot_mapping
        self._shared = shared
        self._batch_invariant = batch_invariant
        self._groups_of: dict[int | None, list[AttentionGroup]] = {}

    def attend(self, layer: LayerAttention, query: Tensor, key_value: Tensor) -> Tensor:
        """Store `key_value` (rows, 2 * kv_heads, head_dim), attend causally with `query` (rows, heads, head_dim).

        Rows behind those of the spans are padding: nothing is stored of them, and they get zeros.
        """
        cache = self._cache[layer.index]
        num_rows = len(self._slots)
        cache.view(-1, *cache.shape[2:]).index_copy_(0, self._slots, key_value[:num_rows])
        groups = self._groups(layer.window)
        if len(groups) == 1 and groups[0].kept is None:  # a pure decode batch: nothing to rearrange
            mixed = _attend_group(groups[0], layer.scale, query[:num_rows], cache)
            return functional.pad(mixed, (0, 0, 0, 0, 0, len(query) - num_rows))
        out = torch.zeros_like(query)
        for group in groups:
            mixed = _attend_group(group, layer.scale, query.index_select(0, group.rows), cache)
            rows = group.rows
            if group.kept is not None:
                mixed, rows = mixed.index_select(0, group.kept), rows.index_select(0, group.kept)
            out.index_copy_(0, rows, mixed)
        return out

    def _groups(self, window: int | None) -> list[AttentionGroup]:
        """The plan of all layers with this window, made when the first of them asks."""
        if window not in self._groups_of:
            self._groups_of[window] = self._plan(window)
        return self._groups_of[window]

    def _plan(self, window: int | None) -> list[AttentionGroup]:
        block_size = self._cache.shape[2]
        reaches: list[_Reach] = []
        row = 0
        for span in self._spans:
            pieces = _aligned(span, block_size) if self._batch_invariant else [span]
            for piece in pieces:
                reaches.append(_reach(row, piece, window, block_size))
                row += piece.length
        grouped = _by_blocks(reaches) if self._batch_invariant else _by_length(reaches)
        queries = block_size if self._batch_invariant else None
        return [self._build(members, window, queries) for members in grouped]

    def _build(self, members: list[_Reach], window: int | None, queries: int | None) -> AttentionGroup:
        """One padded call. With `queries` each query has its place by its position, else the first one is first."""
        device, block_size = self._cache.device, self._cache.shape[2]
        lead = torch.tensor([member.span.start % queries if queries else 0 for member in members])[:, None]
        queries = queries or max(member.span.length for member in members)
        num_blocks = max(member.end - member.first for member in members)
        first_row = torch.tensor([member.row for member in members])[:, None]
        starts = torch.tensor([member.span.start for member in members])[:, None]
        lengths = torch.tensor([member.span.length for member in members])[:, None]
        first_key = torch.tensor([member.first * block_size for member in members])[:, None, None]
        offsets = torch.arange(queries) - lead
        real = (offsets >= 0) & (offsets < lengths)
        offsets = offsets * real  # padding repeats the first query
        positions = (starts + offsets)[:, :, None]
        keys = first_key + torch.arange(num_blocks * block_size)
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
        tables = [_padded(member.span.block_table[member.first : member.end], num_blocks) for member in members]
        mask = torch.zeros(hidden.shape, dtype=self._cache.dtype).masked_fill(hidden, -torch.inf)
        kept = None if bool(real.all()) else real.flatten().nonzero().flatten().to(device)
        return AttentionGroup(
            sequences=len(members),
            queries=queries,
            rows=(first_row + offsets).flatten().to(device),
            blocks=torch.tensor(tables).flatten().to(device),
            mask=mask[:, None].repeat(1, 1, self._shared, 1).to(device),
            kept=kept,
        )


@dataclass(frozen=True, slots=True)
class _Reach:
    """A span whose first row is `row`, and the blocks its queries can see: `first` to `end - 1` of its table."""

    row: int
    span: QuerySpan
    first: int
    end: int


def _reach(row: int, span: QuerySpan, window: int | None, block_size: int) -> _Reach:
    oldest = 0 if window is None else max(0, span.start - window + 1)
    return _Reach(row, span, oldest // block_size, -(-(span.start + span.length) // block_size))


def _aligned(span: QuerySpan, block_size: int) -> list[QuerySpan]:
    """A span cut at block borders.

    Each piece is computed with its queries where they stand in their block and with the keys up to the end of that
    block: the same matrix products for a position, whether it comes alone or in a chunk of any size.
    """
    end = span.start + span.length
    starts = [span.start, *range(span.start - span.start % block_size + block_size, end, block_size)]
    return [
        QuerySpan(start, stop - start, span.block_table) for start, stop in zip(starts, [*starts[1:], end], strict=True)
    ]


def _by_blocks(reaches: list[_Reach]) -> list[list[_Reach]]:
    """Groups without padded keys: equally many blocks each."""
    grouped: dict[int, list[_Reach]] = {}
    for reach in reaches:
        grouped.setdefault(reach.end - reach.first, []).append(reach)
    return list(grouped.values())


def _by_length(reaches: list[_Reach]) -> list[list[_Reach]]:
    """Short queries of similar key length share a group; every long one (a prefill chunk) is its own.

    Similar: the same power of two of blocks, so that padding at most doubles the keys read.
    """
    grouped: dict[int, list[_Reach]] = {}
    for index, reach in enumerate(reaches):
        size = (reach.end - reach.first).bit_length() if reach.span.length <= _SHORT_QUERY else -1 - index
        grouped.setdefault(size, []).append(reach)
    return list(grouped.values())


def _padded(blocks: Sequence[int], length: int) -> list[int]:
    return [*blocks, *[0] * (length - len(blocks))]


def _attend_group(group: AttentionGroup, scale: float, query: Tensor, cache: Tensor) -> Tensor:
    """`query` (sequences * queries, heads, head_dim) attends over its blocks; same shape out.

    Query heads that share a KV head are folded into the query dimension, so keys are never repeated.
    """
    kv_heads, head_dim = cache.shape[2] // 2, cache.shape[3]
    heads = query.shape[1]
    folded = query.view(group.sequences, group.queries, kv_heads, heads // kv_heads, head_dim).permute(0, 2, 3, 1, 4)
    seen = cache.index_select(0, group.blocks).view(group.sequences, -1, 2 * kv_heads, head_dim).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(
        folded.reshape(group.sequences, kv_heads, -1, head_dim),
        seen[:, :kv_heads],
        seen[:, kv_heads:],
        attn_mask=group.mask,
        scale=scale,
    )
    unfolded = mixed.view(group.sequences, kv_heads, heads // kv_heads, group.queries, head_dim).permute(0, 3, 1, 2, 4)
    return unfolded.reshape(-1, heads, head_dim)
