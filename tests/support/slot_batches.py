"""Ragged batches over the block tables of slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from updraft.kernels.attention.block_tables import BlockTables
from updraft.kernels.attention.ragged_batch import RaggedBatch
from updraft.kernels.attention.types import QuerySpan


def slot_batch(tables: BlockTables, spans: Sequence[QuerySpan], num_rows: int, block_size: int) -> RaggedBatch:
    """Put the tables of the spans into slots 0, 1, 2 ... and return their batch, padded to `num_rows`."""
    tables.replace([(slot, 0, [*span.block_table][: tables.width]) for slot, span in enumerate(spans)])
    position = np.array([span.start for span in spans], np.int64)
    rows = np.array([span.length for span in spans], np.int64)
    table = np.arange(len(spans)) * tables.width
    return RaggedBatch.in_tables(position, rows, table, tables, block_size).padded(num_rows)
