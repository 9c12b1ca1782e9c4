"""A ragged batch as arrays: rows and blocks of its sequences, and each row's position and slot in the cache.

The arrays are numpy, because a step needs a dozen small arrays, and torch takes ten times longer to create one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...protocol.errors import ConfigurationError
from .block_tables import BlockNumbers, BlockTables, Ints
from .types import QuerySpan

_NO_BLOCKS = np.zeros(0, np.int32)


@dataclass(frozen=True)
class RaggedBatch:
    """Sequences of a batch, in the order of their rows.

    Padding is an extra sequence at the end, at negative positions, so that it sees no key.
    """

    # Per sequence: position of the first row, number of rows, index of the first row, start of its table in `blocks`.
    position: Ints
    rows: Ints
    first_row: Ints
    table: Ints
    # Block tables of all sequences; may contain other tables.
    tables: BlockTables
    block_size: int

    @classmethod
    def of(cls, spans: Sequence[QuerySpan], num_rows: int, block_size: int) -> RaggedBatch:
        """Build a batch of `spans`, given in the order of their rows. Further rows, up to `num_rows`, are padding."""
        position = np.array([span.start for span in spans], dtype=np.int64)
        rows = np.array([span.length for span in spans], dtype=np.int64)
        lengths = -(-(position + rows) // block_size)
        used = zip(spans, lengths.tolist(), strict=True)
        blocks = np.concatenate(
            [_NO_BLOCKS, *(np.asarray(span.block_table, np.int32)[:length] for span, length in used)]
        )
        return cls.in_tables(position, rows, starts(lengths), BlockTables.of(blocks), block_size).padded(num_rows)

    @classmethod
    def in_tables(cls, position: Ints, rows: Ints, table: Ints, tables: BlockTables, block_size: int) -> RaggedBatch:
        """Build a batch without padding. The tables of its sequences start at `table` in `tables.flat`."""
        columns = np.zeros((3, len(rows) + 1), np.int64)
        columns[0, :-1], columns[1, :-1], columns[2, :-1] = position, rows, table
        return cls(columns[0], columns[1], starts(columns[1]), columns[2], tables, block_size)

    def padded(self, num_rows: int) -> RaggedBatch:
        """Return the batch with padding up to `num_rows`."""
        padding = num_rows - self.num_real_rows
        if padding == self.rows[-1]:
            return self
        position, rows = self.position.copy(), self.rows.copy()
        position[-1], rows[-1] = -padding, padding
        return replace(self, position=position, rows=rows)

    def earlier(self, by: Ints) -> RaggedBatch:
        """Return the batch with each sequence, except the padding, beginning earlier by a number of positions."""
        return replace(self, position=self.position - np.append(by, 0))

    def between(self, first: int, last: int) -> RaggedBatch:
        """Return the rows from `first` to before `last`, as a batch without padding."""
        begin = np.maximum(self.first_row[:-1], first)
        rows = np.minimum(self.first_row[:-1] + self.rows[:-1], last) - begin
        kept = np.flatnonzero(rows > 0)
        position = (self.position[:-1] + begin - self.first_row[:-1])[kept]
        return RaggedBatch.in_tables(position, rows[kept], self.table[:-1][kept], self.tables, self.block_size)

    @property
    def blocks(self) -> BlockNumbers:
        return self.tables.flat

    @property
    def spans(self) -> list[QuerySpan]:
        """The sequences without the padding."""
        columns = zip(self.position[:-1].tolist(), self.rows[:-1].tolist(), self.table[:-1].tolist(), strict=True)
        return [
            QuerySpan(start, length, self.blocks[table : table - (-(start + length) // self.block_size)].tolist())
            for start, length, table in columns
        ]

    @property
    def num_real_rows(self) -> int:
        return int(self.first_row[-1])

    @cached_property
    def row_places(self) -> tuple[Ints, Ints]:
        """The sequence of each row, and the row's number in its sequence."""
        return repeated(self.rows)

    def positions(self) -> Ints:
        """Return the position of each row; negative for padding."""
        sequence, row = self.row_places
        return self.position[sequence] + row

    def slots(self) -> Ints:
        """Return the slot of each row's key and value, block * block_size + offset; -1 for padding."""
        sequence, _ = self.row_places
        position, size = self.positions(), self.block_size
        if self.rows[-1] == 0:
            return self.blocks[self.table[sequence] + position // size].astype(np.int64) * size + position % size
        real = self.num_real_rows
        slots, position = np.full(len(position), -1, dtype=np.int64), position[:real]
        blocks = self.blocks[self.table[sequence[:real]] + position // size].astype(np.int64)
        slots[:real] = blocks * size + position % size
        return slots


@dataclass(frozen=True, slots=True)
class Passes:
    """A ragged batch computed one row per sequence at a time: all first rows, then all second rows, and so on."""

    batch: RaggedBatch
    # (passes,): number of sequences in each pass. A pass always computes the first sequences of the batch.
    live: Ints
    # (rows,): for each row in the order of the passes, the row's index in the batch, and the index of its sequence.
    row: Ints
    sequence: Ints

    @classmethod
    def of(cls, batch: RaggedBatch) -> Passes:
        """Build the passes. Raises ConfigurationError if a sequence has no row, or more rows than the previous one."""
        lengths = batch.rows[:-1]
        if not len(lengths) or lengths[-1] < 1 or (np.diff(lengths) > 0).any():
            raise ConfigurationError(f"Sequences must have rows, and start with the longest; got {lengths.tolist()}.")
        sequence, index = repeated(batch.rows)
        row = np.argsort(index, kind="stable")
        return cls(batch, np.bincount(index), row, sequence[row])

    def positions(self) -> Ints:
        """Return the position of each row, in the order of the passes."""
        return self.batch.positions()[self.row]

    def slots(self) -> Ints:
        """Return the slot of each row, in the order of the passes."""
        return self.batch.slots()[self.row]


def repeated(counts: Ints) -> tuple[Ints, Ints]:
    """Repeat each index by its count and number the repetitions: [2, 1] gives [0, 0, 1] and [0, 1, 0]."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - starts(counts)[index]


def starts(lengths: Ints) -> Ints:
    """Return the start of each of several consecutive parts: lengths [2, 3, 1] give [0, 2, 5]."""
    return np.cumsum(lengths) - lengths
