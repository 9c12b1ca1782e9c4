"""Groups of sequences for one padded attention call in plain torch, and the cache pages of their keys.

Groups are planned once per forward pass and window, for all layers. Groups are built in numpy, because a batch needs a
dozen small arrays, and torch takes ten times longer to create one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .types import QuerySpan

#: Spans up to this long (decodes, drafts to verify) share a padded call; longer spans (prefill chunks) do not.
_SHORT_QUERY = 16
#: Cost of another call, in blocks of padding: a call is worthwhile if it avoids more padding.
_CALL_BLOCKS = 128


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences computed in one padded call."""

    sequences: int
    queries: int
    # (sequences * queries,) int64: row of each query in the ragged batch. Padding repeats the sequence's first row.
    rows: Tensor
    # int64: indices into the cache as (blocks * 2 * kv_heads, block_size, head_dim), sorted by kind (keys, then
    # values), sequence, head and block. Padding uses block 0.
    pages: Tensor
    # (sequences, 1, queries, keys) float32: 0 for keys that a query may see, -inf for others.
    mask: Tensor
    # (sequences, keys) bool: keys that no query sees, and that may be NaN.
    padding: Tensor
    # int64: entries of `rows` that are not padding; None if no entry is padding.
    kept: Tensor | None

    @property
    def is_short(self) -> bool:
        return self.queries <= _SHORT_QUERY


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Tokens per block, and number of KV heads."""

    block_size: int
    kv_heads: int


def plan_groups(
    spans: Sequence[QuerySpan], cache: CacheShape, window: int | None, *, batch_invariant: bool
) -> list[AttentionGroup]:
    """Group all `spans`, given in the order of their rows, into few attention calls with little padding."""
    ranges: list[_KeyRange] = []
    row = 0
    for span in spans:
        pieces = _aligned(span, cache.block_size) if batch_invariant else [span]
        for piece in pieces:
            first_query = piece.start - piece.start % cache.block_size if batch_invariant else piece.start
            ranges.append(_key_range(row, piece, first_query, window, cache.block_size))
            row += piece.length
    if batch_invariant:
        return [_build(members, cache, window, cache.block_size) for members in _by_blocks(ranges)]
    return [_build(members, cache, window, None) for members in _by_length(ranges)]


@dataclass(frozen=True, slots=True)
class _KeyRange:
    """A span whose first row is `row`. Its queries can see the entries `first` to `end - 1` of its block table."""

    row: int
    span: QuerySpan
    first: int
    end: int

    @property
    def num_blocks(self) -> int:
        return self.end - self.first


def _key_range(row: int, span: QuerySpan, first_query: int, window: int | None, block_size: int) -> _KeyRange:
    """Return the key range of `span`, from the oldest key that a query at position `first_query` can see."""
    oldest = 0 if window is None else max(0, first_query - window + 1)
    return _KeyRange(row, span, oldest // block_size, -(-(span.start + span.length) // block_size))


def _aligned(span: QuerySpan, block_size: int) -> list[QuerySpan]:
    """Cut a span at block borders, for batch-invariant attention.

    A piece is computed like a full block of queries: each query at its offset in the block, over all keys that any
    query of the block sees. Every position then has the same matrix products, alone or in a chunk of any size.
    """
    end = span.start + span.length
    starts = [span.start, *range(span.start - span.start % block_size + block_size, end, block_size)]
    return [
        QuerySpan(start, stop - start, span.block_table) for start, stop in zip(starts, [*starts[1:], end], strict=True)
    ]


def _by_blocks(ranges: list[_KeyRange]) -> list[list[_KeyRange]]:
    """Group ranges with equal numbers of blocks, so that no keys are padded."""
    grouped: dict[int, list[_KeyRange]] = {}
    for key_range in ranges:
        grouped.setdefault(key_range.num_blocks, []).append(key_range)
    return list(grouped.values())


def _by_length(ranges: list[_KeyRange]) -> list[list[_KeyRange]]:
    """Group short spans, sorted by number of keys. A group ends where more padding would cost more than a new call."""
    grouped = [[key_range] for key_range in ranges if key_range.span.length > _SHORT_QUERY]
    short = [key_range for key_range in ranges if key_range.span.length <= _SHORT_QUERY]
    decodes = [key_range for key_range in short if key_range.span.length == 1]  # not padded to drafts' length
    for alike in (decodes, [key_range for key_range in short if key_range.span.length > 1]):
        grouped += _with_little_padding(sorted(alike, key=attrgetter("num_blocks"), reverse=True))
    return [sorted(members, key=attrgetter("row")) for members in grouped]


def _with_little_padding(ranges: list[_KeyRange]) -> list[list[_KeyRange]]:
    grouped: list[list[_KeyRange]] = []
    padding = _CALL_BLOCKS
    for key_range in ranges:
        padding += grouped[-1][0].num_blocks - key_range.num_blocks if grouped else 0
        if padding >= _CALL_BLOCKS:
            grouped.append([])
            padding = 0
        grouped[-1].append(key_range)
    return grouped


def _build(members: list[_KeyRange], cache: CacheShape, window: int | None, queries: int | None) -> AttentionGroup:
    """Build one padded call. `queries`: the block size if queries keep their offsets in the block, else None."""
    starts = _column(member.span.start for member in members)
    lengths = _column(member.span.length for member in members)
    lead = starts % queries if queries else 0
    queries = queries or max(member.span.length for member in members)
    num_blocks = max(member.num_blocks for member in members)
    offsets = np.arange(queries) - lead
    real = (offsets >= 0) & (offsets < lengths)
    offsets = offsets * real  # padding repeats the first query
    mask = _mask(members, starts + offsets, num_blocks * cache.block_size, window, cache.block_size)
    return AttentionGroup(
        sequences=len(members),
        queries=queries,
        rows=_tensor(_column(member.row for member in members) + offsets),
        pages=_tensor(_pages(members, num_blocks, cache.kv_heads)),
        mask=torch.from_numpy(mask),
        padding=torch.from_numpy((mask < 0).all(axis=(1, 2))),
        kept=None if real.all() else _tensor(real.ravel().nonzero()[0]),
    )


def _pages(members: list[_KeyRange], num_blocks: int, kv_heads: int) -> NDArray[np.int64]:
    tables = np.zeros((len(members), num_blocks), dtype=np.int64)
    for table, member in zip(tables, members, strict=True):
        table[: member.num_blocks] = member.span.block_table[member.first : member.end]
    tables = tables.clip(min=0)  # negative entries are freed blocks before the window, which no query sees
    parts = np.arange(2 * kv_heads).reshape(2, 1, kv_heads, 1)
    return tables[:, None] * (2 * kv_heads) + parts


def _mask(
    members: list[_KeyRange], positions: NDArray[np.int64], num_keys: int, window: int | None, block_size: int
) -> NDArray[np.float32]:
    keys = (_column(member.first for member in members) * block_size + np.arange(num_keys))[:, None, None, :]
    positions = positions[:, None, :, None]
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    mask = np.zeros(hidden.shape, dtype=np.float32)
    mask[hidden] = -np.inf
    return mask


def _column(values: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64)[:, None]


def _tensor(values: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(values.ravel())
