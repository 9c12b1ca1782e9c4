"""Forward passes captured as CUDA graphs, so that a decode step is one launch instead of hundreds.

Graphs have fixed sizes: one for each of `graph_sizes`, captured at startup. A step is padded to the smallest graph
that holds its rows and sequences. Steps that read prompts, and steps with more rows, run without a graph.
"""

# torch leaves `from_numpy` untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.attention.block_tables import BlockTables
from ....kernels.attention.metadata import GraphMetadata
from ....kernels.attention.ops import TritonBackend
from ....kernels.attention.ragged_batch import RaggedBatch
from ....kernels.runtime.transfer import to_device
from ...models.decoder import Decoder

#: Maximum rows of a graph with drafts. In longer steps, the launches take less time than the computation.
MAX_DRAFT_ROWS = 512
_LEAST_DRAFT_ROWS = 16  # fewer rows take the same time, because tensor cores multiply tiles of 16 rows
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class GraphSize:
    """The capacity of a graph in rows (tokens) and sequences."""

    rows: int
    sequences: int


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Limits of a step without prompts."""

    sequences: int
    # Rows of all sequences together, if any sequence has drafts.
    draft_rows: int

    @property
    def rows(self) -> int:
        return max(self.sequences, self.draft_rows)


def graph_sizes(limits: GraphLimits) -> list[GraphSize]:
    """Return graph sizes, smallest first: without drafts (one row per sequence), and with drafts.

    With drafts, rows grow by factors of two, and sequences by factors of four: a graph's attention is tuned for its
    rows per sequence, but computes any.
    """
    most, most_rows = limits.sequences, limits.draft_rows
    sizes = {size for size in (1, 2, 4, *range(8, 65, 8), *range(96, most, 32)) if size < most} | {most}
    doubled = {_LEAST_DRAFT_ROWS << power for power in range(most_rows.bit_length())}
    lengths = {rows for rows in doubled if rows < most_rows} | {most_rows}
    quadrupled = {4**power for power in range(most.bit_length()) if 4**power < most} | {most}
    drafts = {GraphSize(rows, size) for size in quadrupled for rows in lengths if rows > size}
    return sorted({GraphSize(size, size) for size in sizes} | drafts)


def smallest_size(sizes: Sequence[GraphSize], rows: int, sequences: int) -> GraphSize | None:
    """Return the smallest of the sorted `sizes` that holds `rows` and `sequences`, or None."""
    return next((size for size in sizes if size.rows >= rows and size.sequences >= sequences), None)


#: Runs and records tensor operations; returns a callable that replays them on the new contents of their input tensors.
Recorder = Callable[[Callable[[], None]], Callable[[], None]]


class CudaRecorder:
    """Records CUDA graphs in one shared memory pool; only one graph may be replayed at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()  # one stream for all captures, because cuBLAS keeps a workspace per stream

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        side = self._side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compute()  # warm up: kernels must be compiled and chosen before the capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            compute()
        return graph.replay


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    """A captured forward pass and its inputs: attention metadata, token ids and positions (rows,) int64."""

    replay: Callable[[], None]
    metadata: GraphMetadata
    token_ids: Tensor
    positions: Tensor


class StepGraphs:
    """All graphs of a model. Each `run` overwrites the result of the previous one."""

    def __init__(
        self, model: Decoder, backend: TritonBackend, limits: GraphLimits, tables: BlockTables, record: Recorder
    ) -> None:
        """Capture the graphs, the largest first, so that the others can reuse its memory. Takes seconds.

        All graphs read the copy of `tables` on the device.
        """
        started = time.perf_counter()
        self._model, self._backend, self._tables = model, backend, tables
        self._device = backend.cache.device
        self._sizes = graph_sizes(limits)
        shape = self._sizes[-1].rows, model.config.vocab_size
        self._logits = torch.empty(shape, dtype=torch.float32, device=self._device)  # shared by all graphs
        self._captured = {size: self._capture(size, record) for size in reversed(self._sizes)}
        _LOG.info("captured %d CUDA graphs in %.1f s", len(self._captured), time.perf_counter() - started)

    def run(self, batch: RaggedBatch, token_ids: Tensor, shift: Tensor | None = None) -> Tensor | None:
        """Return the logits of all rows, (rows, vocab) float32, or None if no graph fits the batch or its tables.

        `token_ids` (rows,) int64 may be on the host, or on the device and still being computed. `shift`: see
        `AttentionMetadata.shift_`.
        """
        rows = len(token_ids)
        size = smallest_size(self._sizes, rows, len(batch.rows) - 1)
        if size is None or batch.tables is not self._tables:
            return None
        captured, batch = self._captured[size], batch.padded(size.rows)
        captured.metadata.fill_(batch)
        captured.token_ids[:rows].copy_(to_device(token_ids, self._device))
        if shift is not None:
            captured.positions.copy_(captured.metadata.metadata.shift_(batch, shift))
        else:
            captured.positions.copy_(to_device(torch.from_numpy(batch.positions().clip(0)), self._device))
        captured.replay()
        return self._logits[:rows]

    @torch.inference_mode()
    def _capture(self, size: GraphSize, record: Recorder) -> _CapturedGraph:
        backend = self._backend
        metadata = GraphMetadata(backend.planner, size.rows, size.sequences, self._tables)
        token_ids = torch.zeros(size.rows, dtype=torch.int64, device=self._device)
        positions = torch.zeros_like(token_ids)

        def compute() -> None:
            attention = backend.attention(metadata.metadata)
            self._logits[: size.rows].copy_(self._model.logits(self._model(token_ids, positions, attention)))

        return _CapturedGraph(record(compute), metadata, token_ids, positions)
