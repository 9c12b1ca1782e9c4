"""A ragged batch as arrays: rows and blocks of its sequences, and each row's position and slot in the cache.

The arrays are numpy, because a step needs a dozen small arrays, and torch takes ten times longer to create one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import ConfigurationError
from .types import QuerySpan

Ints = NDArray[np.int64]
_NO_BLOCKS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Sequences of a batch, in the order of their rows.

    Padding is an extra sequence at the end, at negative positions, so that it sees no key.
    """

    spans: Sequence[QuerySpan]
    # Per sequence: position of the first row, number of rows, index of the first row, start of its table in `blocks`.
    position: Ints
    rows: Ints
    first_row: Ints
    table: Ints
    # Block tables of all sequences, one after the other.
    blocks: Ints
    block_size: int

    @classmethod
    def of(cls, spans: Sequence[QuerySpan], num_rows: int, block_size: int) -> RaggedBatch:
        """Build a batch of `spans`, given in the order of their rows. Further rows, up to `num_rows`, are padding."""
        padding = num_rows - sum(span.length for span in spans)
        position = np.array([*(span.start for span in spans), -padding], dtype=np.int64)
        rows = np.array([*(span.length for span in spans), padding], dtype=np.int64)
        lengths = -(-(position + rows) // block_size)
        used = zip(spans, lengths.tolist(), strict=False)
        blocks = np.concatenate(
            [_NO_BLOCKS, *(np.asarray(span.block_table, np.int64)[:length] for span, length in used)]
        )
        return cls(spans, position, rows, starts(rows), starts(lengths), blocks, block_size)

    @property
    def num_real_rows(self) -> int:
        return int(self.first_row[-1])

    def positions(self) -> Ints:
        """Return the position of each row; negative for padding."""
        sequence, row = repeated(self.rows)
        return self.position[sequence] + row

    def slots(self) -> Ints:
        """Return the slot of each row's key and value, block * block_size + offset; -1 for padding."""
        sequence, row = repeated(self.rows)
        position = self.position[sequence] + row
        real = position >= 0
        slots = np.full(len(position), -1, dtype=np.int64)
        table, position = self.table[sequence[real]], position[real]
        slots[real] = self.blocks[table + position // self.block_size] * self.block_size + position % self.block_size
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
    def of(cls, spans: Sequence[QuerySpan], block_size: int) -> Passes:
        """Build the passes. Raises ConfigurationError if a span has no row, or more rows than the previous span."""
        lengths = [span.length for span in spans]
        if not lengths or lengths[-1] < 1 or any(after > before for before, after in pairwise(lengths)):
            raise ConfigurationError(f"Spans must not be empty, and start with the longest; got lengths {lengths}.")
        batch = RaggedBatch.of(spans, sum(lengths), block_size)
        sequence, index = repeated(batch.rows)
        row = np.argsort(index, kind="stable")
        return cls(batch, np.bincount(index), row, sequence[row])

    def positions(self) -> Ints:
        """Return the position of each row, in the order of the passes."""
        return self.batch.positions()[self.row]

    def slots(self) -> Ints:
        """Return the slot of each row, in the order of the passes."""
        return self.batch.slots()[self.row]


def shifted(spans: Sequence[QuerySpan], by: Sequence[int]) -> list[QuerySpan]:
    """Return the spans, each beginning earlier by a number of positions."""
    return [
        QuerySpan(span.start - number, span.length, span.block_table) for span, number in zip(spans, by, strict=True)
    ]


def repeated(counts: Ints) -> tuple[Ints, Ints]:
    """Repeat each index by its count and number the repetitions: [2, 1] gives [0, 0, 1] and [0, 1, 0]."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - starts(counts)[index]


def starts(lengths: Ints) -> Ints:
    """Return the start of each of several consecutive parts: lengths [2, 3, 1] give [0, 2, 5]."""
    return np.cumsum(lengths) - lengths
