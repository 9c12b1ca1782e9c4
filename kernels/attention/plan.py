"""Who computes what in one step's attention, decided once on the host instead of by every program of every layer.

The plan is a list of work for the programs of `paged_attention_triton`. Prefill chunks, decodes and drafts to verify
are all the same there: tiles of a sequence's queries, each with the keys it has to visit. Where few tiles see many
keys, the keys are cut into pieces whose results are merged afterwards (flash-decoding, Dao et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..runtime.launch import Launch
from .launch import AttentionShape, piece_lengths, pieces_of, queries_per_tile
from .ragged_batch import Ints, RaggedBatch, repeated, starts
from .types import QuerySpan

#: Columns of `AttentionPlan.work` and `AttentionPlan.merges`. Rows of zeros are nothing to do.
WORK_COLUMNS, MERGE_COLUMNS = 8, 4


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """`work` (pieces, 8): where its sequence's blocks start in `blocks`, first row, number of rows, position of the
    first row, first key, key after the last, first row of its partial result (-1: it is the only piece), unused.

    `merges` (rows, 4), for each row with partial results: the row, where it is in the first piece's result, how many
    rows further it is in the next piece's, number of pieces. `slots` (rows,): where the row's key and value go (block *
    block_size + offset), -1 for nowhere. `blocks`: the block tables, one after the other.
    """

    work: Ints
    merges: Ints
    slots: Ints
    blocks: Ints
    partial_rows: int


def plan_attention(
    spans: Sequence[QuerySpan], num_rows: int, shape: AttentionShape, launch: Launch, multiprocessors: int
) -> AttentionPlan:
    """Rows behind those of the spans, up to `num_rows`, are padding: they are stored nowhere and get zeros."""
    batch = RaggedBatch.of(spans, num_rows, shape.block_size)
    tiles = _tiles(batch, queries_per_tile(shape, launch))
    lengths = piece_lengths(tiles.keys, shape, launch, multiprocessors)
    pieces = pieces_of(tiles.keys, lengths)
    partials = np.where(pieces > 1, pieces * tiles.rows, 0)
    first_partial = starts(partials)
    return AttentionPlan(
        work=_work(tiles, pieces, lengths, first_partial),
        merges=_merges(tiles, pieces, first_partial),
        slots=batch.slots(),
        blocks=batch.blocks,
        partial_rows=int(partials.sum()),
    )


@dataclass(frozen=True, slots=True)
class _Tiles:
    """One entry per tile, those with most keys first so that no long one is left for the end."""

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


def _work(tiles: _Tiles, pieces: Ints, lengths: Ints, first_partial: Ints) -> Ints:
    tile, piece = repeated(pieces)
    rows, first_key = tiles.rows[tile], piece * lengths[tile]
    work = np.zeros((len(tile), WORK_COLUMNS), dtype=np.int64)
    work[:, 0] = tiles.table[tile]
    work[:, 1] = tiles.first_row[tile]
    work[:, 2] = rows
    work[:, 3] = tiles.position[tile]
    work[:, 4] = first_key
    work[:, 5] = np.minimum(first_key + lengths[tile], tiles.keys[tile])
    work[:, 6] = np.where(pieces[tile] > 1, first_partial[tile] + piece * rows, -1)
    return work


def _merges(tiles: _Tiles, pieces: Ints, first_partial: Ints) -> Ints:
    tile, row = repeated(np.where(pieces > 1, tiles.rows, 0))
    return np.stack((tiles.first_row[tile] + row, first_partial[tile] + row, tiles.rows[tile], pieces[tile]), axis=1)
