"""Attention plan of one step, made on the host and shared by all layers.

Prefill chunks, decodes and drafts all become tiles: queries of one sequence with their keys. If there are few tiles
with many keys, the keys are split and the results merged (flash-decoding, Dao et al. 2023). One copy from pinned
memory moves the plan to the device, into a new tensor or into buffers that a CUDA graph reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..runtime.backend import num_multiprocessors
from ..runtime.launch import Launch
from ..runtime.transfer import to_device
from .block_tables import BlockTables
from .launch import AttentionShape, attention_launch, extra_splits, num_splits, queries_per_tile, split_lengths
from .ragged_batch import Ints, RaggedBatch, repeated, starts
from .types import QuerySpan

#: Number of columns of `AttentionPlan.work` and `AttentionPlan.merges`. Rows of zeros are no-ops.
WORK_COLUMNS, MERGE_COLUMNS = 8, 4


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The work of all kernel programs, as arrays."""

    # (splits, 8): start of the sequence's table in all block tables, first row, number of rows, position of the first
    # row, first key, end of the keys (exclusive), first row of the partial result (-1 if the tile is not split), and
    # index of the sequence, which the kernels do not read.
    work: Ints
    # (rows, 4), for each row with partial results: the row, its index in the first split's result, the stride between
    # splits, and the number of splits.
    merges: Ints
    # (rows,): slot of each row's key and value, block * block_size + offset; -1 for padding.
    slots: Ints
    partial_rows: int


def plan_attention(batch: RaggedBatch, shape: AttentionShape, launch: Launch, multiprocessors: int) -> AttentionPlan:
    """Plan the attention of a batch. Keys and values of padding are not stored, and its results are zeros."""
    tiles = _tiles(batch, queries_per_tile(shape, launch))
    lengths = split_lengths(tiles.keys, shape, launch, multiprocessors)
    splits = num_splits(tiles.keys, lengths)
    partials = np.where(splits > 1, splits * tiles.rows, 0)
    first_partial = starts(partials)
    return AttentionPlan(
        work=_work(tiles, splits, lengths, first_partial),
        merges=_merges(tiles, splits, first_partial),
        slots=batch.slots(),
        partial_rows=int(partials.sum()),
    )


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles as parallel arrays. The tile with most keys is first, so that no long tile runs alone at the end."""

    sequence: Ints
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
    columns = (sequence, batch.table[sequence], batch.first_row[sequence] + first, rows, position, keys)
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
    work[:, 7] = tiles.sequence[tile]
    return work


def _merges(tiles: _Tiles, splits: Ints, first_partial: Ints) -> Ints:
    tile, row = repeated(np.where(splits > 1, tiles.rows, 0))
    return np.stack((tiles.first_row[tile] + row, first_partial[tile] + row, tiles.rows[tile], splits[tile]), axis=1)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """An `AttentionPlan` on the device, as int32, with the kernel's launch parameters; shared by all layers."""

    work: Tensor
    merges: Tensor
    slots: Tensor
    # All block tables (`BlockTables.on`).
    blocks: Tensor
    partial_rows: int
    launch: Launch

    def shift_(self, batch: RaggedBatch, by: Tensor) -> Tensor:
        """Begin each sequence of the planned `batch` earlier, by numbers of positions that only the device knows.

        `by` (sequences,) int64, without the padding. Returns the position of each row, (rows,) int64. Kernels do not
        read keys after the last row of a tile, so tiles may keep their ranges of keys.
        """
        sequence, _ = repeated(batch.rows)
        columns = np.stack((sequence, batch.positions(), batch.table[sequence]))
        sequences, positions, tables = to_device(torch.from_numpy(columns), by.device)
        by = torch.cat((by, by.new_zeros(1)))  # the padding keeps its positions
        self.work[:, 3] -= by[self.work[:, 7]].to(torch.int32)
        positions = positions - by[sequences]
        is_padding = positions < 0
        block = self.blocks[torch.where(is_padding, 0, tables + positions // batch.block_size)]
        self.slots.copy_(torch.where(is_padding, -1, block * batch.block_size + positions % batch.block_size))
        return positions.clamp(min=0)


@dataclass(frozen=True, slots=True)
class AttentionPlanner:
    """Plans the attention of each step, for one model on one GPU."""

    shape: AttentionShape
    device: torch.device
    multiprocessors: int

    @classmethod
    def on(cls, device: torch.device, shape: AttentionShape) -> AttentionPlanner:
        return cls(shape, device, num_multiprocessors(device))

    def metadata(self, spans: Sequence[QuerySpan], num_rows: int | None = None) -> AttentionMetadata:
        """Return the metadata of `spans`. Rows beyond the spans, up to `num_rows`, are padding."""
        rows = sum(span.length for span in spans)
        return self.of_batch(RaggedBatch.of(spans, max(num_rows or 0, rows), self.shape.block_size))

    def of_batch(self, batch: RaggedBatch) -> AttentionMetadata:
        """Return the metadata of a batch with any mix of sequences."""
        launch = attention_launch(self.shape, int(batch.rows[:-1].max(initial=1)))
        plan = plan_attention(batch, self.shape, launch, self.multiprocessors)
        sizes = _Sizes(len(plan.work), len(plan.merges), len(plan.slots))
        buffer = _staged(plan, sizes).to(self.device, non_blocking=True)
        return sizes.views(buffer, batch.tables.on(self.device), plan.partial_rows, launch)


class GraphMetadata:
    """Metadata with fixed addresses and sizes for a CUDA graph; `fill_` fills `metadata` for the next replay.

    The graph is captured for `num_rows` rows in up to `most_sequences` sequences, and reads the copy of `tables` on the
    device. It expects `num_rows / most_sequences` queries per sequence. Fewer rows or sequences are padded; sequences
    with more queries are split over more programs.
    """

    def __init__(self, planner: AttentionPlanner, num_rows: int, most_sequences: int, tables: BlockTables) -> None:
        shape = planner.shape
        launch = attention_launch(shape, -(-num_rows // most_sequences))
        queries = queries_per_tile(shape, launch)
        # Maximum number of tiles: one per sequence and for the padding, plus one for every `queries` rows more.
        sequences = min(most_sequences + 1, num_rows)
        tiles = sequences + (num_rows - sequences) // queries
        splits = tiles + extra_splits(shape, launch, planner.multiprocessors)
        self._planner = planner
        self._sizes = _Sizes(splits, num_rows, num_rows)
        buffer = torch.zeros(self._sizes.total, dtype=torch.int32, device=planner.device)
        self._buffer = buffer
        self.metadata = self._sizes.views(buffer, tables.on(planner.device), splits * queries, launch)
        self.fill_(RaggedBatch.of([], num_rows, shape.block_size))

    def fill_(self, batch: RaggedBatch) -> None:
        """Fill the buffers for a batch over the graph's block tables that is padded to the graph's rows.

        Raises ConfigurationError if the batch needs larger buffers."""
        planner, sizes, launch = self._planner, self._sizes, self.metadata.launch
        if batch.num_real_rows > sizes.slots:
            raise self._does_not_fit(batch)
        plan = plan_attention(batch, planner.shape, launch, planner.multiprocessors)
        if len(plan.work) > sizes.work or plan.partial_rows > self.metadata.partial_rows:
            raise self._does_not_fit(batch)
        self._buffer.copy_(_staged(plan, sizes), non_blocking=True)

    def _does_not_fit(self, batch: RaggedBatch) -> ConfigurationError:
        return ConfigurationError(
            f"{len(batch.rows) - 1} sequences with {batch.num_real_rows} rows in total do not fit a CUDA graph over "
            f"{self._sizes.slots} rows."
        )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Lengths of the buffer's parts."""

    work: int
    merges: int
    slots: int

    @property
    def lengths(self) -> tuple[int, int, int]:
        return self.work * WORK_COLUMNS, self.merges * MERGE_COLUMNS, self.slots

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def views(self, buffer: Tensor, blocks: Tensor, partial_rows: int, launch: Launch) -> AttentionMetadata:
        work, merges, slots = buffer.split(self.lengths)
        work, merges = work.view(-1, WORK_COLUMNS), merges.view(-1, MERGE_COLUMNS)
        return AttentionMetadata(work, merges, slots, blocks, partial_rows, launch)


def _staged(plan: AttentionPlan, sizes: _Sizes) -> Tensor:
    """Return the plan in pinned memory, each part padded with zeros.

    Every call allocates a new tensor, because torch reuses pinned memory only after the copy from it has finished.
    """
    staging = torch.zeros(sizes.total, dtype=torch.int32, pin_memory=torch.cuda.is_available())
    numbers: NDArray[np.int32] = staging.numpy()
    start = 0
    for part, length in zip((plan.work, plan.merges, plan.slots), sizes.lengths, strict=True):
        numbers[start : start + part.size] = part.reshape(-1)
        start += length
    return staging
