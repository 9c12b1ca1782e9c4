"""A ragged batch in arrays: where sequences' rows and blocks begin, and each row's position and place in the cache.

In numpy, for a step means a dozen small arrays, and torch takes ten times longer for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import ConfigurationError
from .types import QuerySpan

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """One entry per sequence: first position, number of rows, first row, first entry in `blocks`.

    Rows of padding are one more sequence at the end, at positions so far below zero that it sees no key.
    """

    spans: Sequence[QuerySpan]
    position: Ints
    rows: Ints
    first_row: Ints
    table: Ints
    blocks: Ints
    block_size: int

    @classmethod
    def of(cls, spans: Sequence[QuerySpan], num_rows: int, block_size: int) -> RaggedBatch:
        """`spans` in the order of their rows; rows behind theirs, up to `num_rows`, are padding."""
        padding = num_rows - sum(span.length for span in spans)
        position = np.array([*(span.start for span in spans), -padding], dtype=np.int64)
        rows = np.array([*(span.length for span in spans), padding], dtype=np.int64)
        lengths = -(-(position + rows) // block_size)
        used = (span.block_table[:length] for span, length in zip(spans, lengths[:-1], strict=True))
        blocks = np.fromiter(chain.from_iterable(used), dtype=np.int64, count=int(lengths.sum()))
        return cls(spans, position, rows, starts(rows), starts(lengths), blocks, block_size)

    @property
    def num_real_rows(self) -> int:
        return int(self.first_row[-1])

    def positions(self) -> Ints:
        """Of each row; below zero for padding."""
        sequence, row = repeated(self.rows)
        return self.position[sequence] + row

    def slots(self) -> Ints:
        """Where each row's key and value go: block * block_size + offset; -1 for padding."""
        sequence, row = repeated(self.rows)
        position = self.position[sequence] + row
        real = position >= 0
        slots = np.full(len(position), -1, dtype=np.int64)
        table, position = self.table[sequence[real]], position[real]
        slots[real] = self.blocks[table + position // self.block_size] * self.block_size + position % self.block_size
        return slots


@dataclass(frozen=True, slots=True)
class Passes:
    """The rows of a ragged batch in another order: the first one of every sequence, then the second ones, and so on.

    Pass `p` has the first `live[p]` sequences. `row`: which of the batch's rows comes where; `sequence`: whose it is.
    """

    batch: RaggedBatch
    live: Ints
    row: Ints
    sequence: Ints

    @classmethod
    def of(cls, spans: Sequence[QuerySpan], block_size: int) -> Passes:
        """Raises ConfigurationError where a span has no row, or more than the one before it."""
        lengths = [span.length for span in spans]
        if not lengths or lengths[-1] < 1 or any(after > before for before, after in pairwise(lengths)):
            raise ConfigurationError(f"Passes: spans must not become longer from one to the next, got {lengths}.")
        batch = RaggedBatch.of(spans, sum(lengths), block_size)
        sequence, index = repeated(batch.rows)
        row = np.argsort(index, kind="stable")
        return cls(batch, np.bincount(index), row, sequence[row])

    def positions(self) -> Ints:
        """Of each row."""
        return self.batch.positions()[self.row]

    def slots(self) -> Ints:
        """Of each row, as in the batch."""
        return self.batch.slots()[self.row]


def repeated(counts: Ints) -> tuple[Ints, Ints]:
    """`counts` of each index in turn, and how many of the same came before: [2, 1] to [0, 0, 1], [0, 1, 0]."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - starts(counts)[index]


def starts(lengths: Ints) -> Ints:
    return np.cumsum(lengths) - lengths
