"""Forward passes over chunks of sequences, with a block table for each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from updraft.cloud_engine.engine.worker.model_runner import ForwardBatch, Runner
from updraft.kernels.attention.ragged_batch import RaggedBatch
from updraft.kernels.attention.types import QuerySpan


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence, from position `start` on. The last `num_logits` get logits."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    num_logits: int

    @property
    def span(self) -> QuerySpan:
        return QuerySpan(self.start, len(self.token_ids), self.block_table)


def batch_of(chunks: Sequence[Chunk], block_size: int) -> ForwardBatch:
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    ends = accumulate(len(chunk.token_ids) for chunk in chunks)
    rows = [row for chunk, end in zip(chunks, ends, strict=True) for row in range(end - chunk.num_logits, end)]
    sequences = RaggedBatch.of([chunk.span for chunk in chunks], len(token_ids), block_size)
    return ForwardBatch(sequences, torch.tensor(token_ids, dtype=torch.int64), np.array(rows, np.int64))


def compute(runner: Runner, chunks: Sequence[Chunk]) -> Tensor:
    """Return the logits of all chunks, (sum of num_logits, vocab) float32."""
    return runner.compute(batch_of(chunks, runner.block_size))
