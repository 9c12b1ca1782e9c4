"""Plan of one step's attention: the work of each program, decided once on the host for all layers.

Prefill chunks, decodes and drafts to verify are treated alike, as tiles of a sequence's queries with the keys they
visit. If few tiles see many keys, the keys are split and the results merged (flash-decoding, Dao et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..runtime.launch import Launch
from .launch import AttentionShape, num_splits, queries_per_tile, split_lengths
from .ragged_batch import Ints, RaggedBatch, repeated, starts
from .types import QuerySpan

#: Columns of `AttentionPlan.work` and `AttentionPlan.merges`. Rows of zeros are ignored.
WORK_COLUMNS, MERGE_COLUMNS = 8, 4


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Work of all programs, in arrays that kernels read."""

    # (splits, 8): start of the sequence's blocks in `blocks`, first row, number of rows, position of the first row,
    # first key, key after the last, first row of the partial result (-1 if the tile has one split), unused.
    work: Ints
    # (rows, 4) for each row with partial results: the row, its position in the first split's result, the distance to
    # its position in the next split's result, number of splits.
    merges: Ints
    # (rows,): block * block_size + offset of each row's key and value, -1 for rows that are not stored.
    slots: Ints
    # Block tables, one after the other.
    blocks: Ints
    partial_rows: int


def plan_attention(
    spans: Sequence[QuerySpan], num_rows: int, shape: AttentionShape, launch: Launch, multiprocessors: int
) -> AttentionPlan:
    """Plan a step. Rows after those of the spans, up to `num_rows`, are padding: they are not stored and get zeros."""
    batch = RaggedBatch.of(spans, num_rows, shape.block_size)
    tiles = _tiles(batch, queries_per_tile(shape, launch))
    lengths = split_lengths(tiles.keys, shape, launch, multiprocessors)
    splits = num_splits(tiles.keys, lengths)
    partials = np.where(splits > 1, splits * tiles.rows, 0)
    first_partial = starts(partials)
    return AttentionPlan(
        work=_work(tiles, splits, lengths, first_partial),
        merges=_merges(tiles, splits, first_partial),
        slots=batch.slots(),
        blocks=batch.blocks,
        partial_rows=int(partials.sum()),
    )


@dataclass(frozen=True, slots=True)
class _Tiles:
    """One entry per tile. Tiles with the most keys come first, so that no long tile runs last."""

    table: Ints
    first_row: Ints
    rows: Ints
    position: Ints
    keys: Ints


def _tiles(batch: RaggedBatch, queries: int) -> _Tiles:
    sequence, index = repeated(-(-batch.rows // queries))
    first = index * queries
    rows = np.minimum(batch.rows[sequence] - first, queries)
    position = batch.position[sequence] + first
    keys = np.maximum(position + rows, 0)
    order = np.argsort(-keys, kind="stable")
    columns = (batch.table[sequence], batch.first_row[sequence] + first, rows, position, keys)
    return _Tiles(*(column[order] for column in columns))


def _work(tiles: _Tiles, splits: Ints, lengths: Ints, first_partial: Ints) -> Ints:
    tile, split = repeated(splits)
    rows, first_key = tiles.rows[tile], split * lengths[tile]
    work = np.zeros((len(tile), WORK_COLUMNS), dtype=np.int64)
    work[:, 0] = tiles.table[tile]
    work[:, 1] = tiles.first_row[tile]
    work[:, 2] = rows
    work[:, 3] = tiles.position[tile]
    work[:, 4] = first_key
    work[:, 5] = np.minimum(first_key + lengths[tile], tiles.keys[tile])
    work[:, 6] = np.where(splits[tile] > 1, first_partial[tile] + split * rows, -1)
    return work


def _merges(tiles: _Tiles, splits: Ints, first_partial: Ints) -> Ints:
    tile, row = repeated(np.where(splits > 1, tiles.rows, 0))
    return np.stack((tiles.first_row[tile] + row, first_partial[tile] + row, tiles.rows[tile], splits[tile]), axis=1)
