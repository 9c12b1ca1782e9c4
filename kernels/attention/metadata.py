"""Attention plans on the device: copied from pinned memory in one transfer, or written to buffers of a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..runtime.backend import num_multiprocessors
from ..runtime.launch import Launch
from .launch import AttentionShape, attention_launch, extra_splits, queries_per_tile
from .plan import MERGE_COLUMNS, WORK_COLUMNS, AttentionPlan, plan_attention
from .types import QuerySpan

_ALIGNED = 4  # int32 values in 16 bytes, the alignment that Triton specializes for


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """An `AttentionPlan` on the device, all int32, and the kernel's launch; the same for all layers."""

    work: Tensor
    merges: Tensor
    slots: Tensor
    blocks: Tensor
    partial_rows: int
    launch: Launch


@dataclass(frozen=True, slots=True)
class AttentionPlanner:
    """Plans the steps of one model on one GPU."""

    shape: AttentionShape
    device: torch.device
    multiprocessors: int

    @classmethod
    def on(cls, device: torch.device, shape: AttentionShape) -> AttentionPlanner:
        return cls(shape, device, num_multiprocessors(device))

    def metadata(self, spans: Sequence[QuerySpan], num_rows: int | None = None) -> AttentionMetadata:
        """Return the metadata of one step, of any mix of spans. Rows after the spans, up to `num_rows`, are padding."""
        rows = sum(span.length for span in spans)
        launch = attention_launch(self.shape, max((span.length for span in spans), default=1))
        plan = plan_attention(spans, max(num_rows or 0, rows), self.shape, launch, self.multiprocessors)
        sizes = _Sizes(len(plan.work), len(plan.merges), len(plan.slots), len(plan.blocks))
        return sizes.views(_staged(plan, sizes).to(self.device, non_blocking=True), plan.partial_rows, launch)

    def graph_metadata(self, num_rows: int, most_sequences: int, most_blocks: int) -> GraphMetadata:
        """Return buffers for a CUDA graph of `num_rows` rows: at most `most_sequences` of `most_blocks` blocks each."""
        return GraphMetadata(self, num_rows, most_sequences, most_blocks)


class GraphMetadata:
    """Metadata for a CUDA graph, with fixed addresses and sizes; `update_` fills `metadata` for the next replay.

    The graph is captured for `num_rows` rows of `num_rows / most_sequences` queries each. Fewer rows and sequences are
    padded; sequences with more queries are split over more programs.
    """

    def __init__(self, planner: AttentionPlanner, num_rows: int, most_sequences: int, most_blocks: int) -> None:
        shape = planner.shape
        launch = attention_launch(shape, -(-num_rows // most_sequences))
        queries = queries_per_tile(shape, launch)
        # One tile for the first row of each sequence and of the padding, plus one per further full tile.
        sequences = min(most_sequences + 1, num_rows)
        tiles = sequences + (num_rows - sequences) // queries
        splits = tiles + extra_splits(shape, launch, planner.multiprocessors)
        self._planner = planner
        self._sizes = _Sizes(splits, num_rows, num_rows, most_sequences * most_blocks)
        buffer = torch.zeros(self._sizes.total, dtype=torch.int32, device=planner.device)
        self._buffer = buffer
        self.metadata = self._sizes.views(buffer, splits * queries, launch)
        self.update_([])

    def update_(self, spans: Sequence[QuerySpan]) -> None:
        """Raises ConfigurationError for more sequences, rows or blocks than the buffers can hold."""
        planner, sizes, launch = self._planner, self._sizes, self.metadata.launch
        if sum(span.length for span in spans) > sizes.slots:
            raise self._does_not_fit(spans)
        plan = plan_attention(spans, sizes.slots, planner.shape, launch, planner.multiprocessors)
        used = replace(sizes, blocks=len(plan.blocks))
        if len(plan.work) > sizes.work or used.blocks > sizes.blocks or plan.partial_rows > self.metadata.partial_rows:
            raise self._does_not_fit(spans)
        self._buffer[: used.total].copy_(_staged(plan, used), non_blocking=True)

    def _does_not_fit(self, spans: Sequence[QuerySpan]) -> ConfigurationError:
        rows = sum(span.length for span in spans)
        return ConfigurationError(
            f"{len(spans)} sequences of {rows} rows do not fit a CUDA graph over {self._sizes.slots} rows."
        )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Entries of each part of the buffer. The blocks come last, so that unused ones are not copied."""

    work: int
    merges: int
    slots: int
    blocks: int

    @property
    def lengths(self) -> tuple[int, int, int, int]:
        slots = -(-self.slots // _ALIGNED) * _ALIGNED
        return self.work * WORK_COLUMNS, self.merges * MERGE_COLUMNS, slots, self.blocks

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def views(self, buffer: Tensor, partial_rows: int, launch: Launch) -> AttentionMetadata:
        work, merges, slots, blocks = buffer.split(self.lengths)
        return AttentionMetadata(
            work.view(-1, WORK_COLUMNS),
            merges.view(-1, MERGE_COLUMNS),
            slots[: self.slots],
            blocks,
            partial_rows,
            launch,
        )


def _staged(plan: AttentionPlan, sizes: _Sizes) -> Tensor:
    """Return the plan in pinned memory, each part padded with zeros.

    Always a new tensor: torch's pinned allocator reuses memory only after the copy from it has finished.
    """
    staging = torch.zeros(sizes.total, dtype=torch.int32, pin_memory=torch.cuda.is_available())
    numbers: NDArray[np.int32] = staging.numpy()
    start = 0
    for part, length in zip((plan.work, plan.merges, plan.slots, plan.blocks), sizes.lengths, strict=True):
        numbers[start : start + part.size] = part.reshape(-1)
        start += length
    return staging
