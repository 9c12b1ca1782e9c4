"""The model runner: one forward pass over any mix of prefill chunks, decodes and drafts, one row per token."""

# torch leaves `from_numpy` and `tolist` untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ....kernels.attention.block_tables import BlockTables
from ....kernels.attention.cpu import NativeAttention
from ....kernels.attention.ops import TritonBackend, choose_backend
from ....kernels.attention.ragged_batch import Ints, Passes, RaggedBatch
from ....kernels.experts.ops import separate_experts
from ....kernels.linear.ops import least_rows, pack_linears
from ....kernels.runtime.backend import BackendName
from ....kernels.runtime.native_library import load
from ....kernels.runtime.transfer import HostCopy, to_device
from ....kernels.sampling.ops import sample as sample_rows
from ....kernels.sampling.types import Sampling
from ...models.causal_model import CausalModel
from ...models.compile import CompiledDecoder, compile_decoder
from ...models.decoder import Decoder
from ..config import CacheOptions, EngineConfig
from ..kv.sizing import cache_spec
from ..rank_messages import Capture, ComputeZeros, NewRunner, Release, Restore
from .cuda_graphs import MAX_DRAFT_ROWS, CudaRecorder, GraphLimits, StepGraphs
from .launched_step import UnreadInputs
from .sampler import SamplingRows, sampling_of
from .slots import SlotState

_PART_ROWS, _PARTS_PER_STAGE = 256, 2
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The rows of a forward pass."""

    # Without padding.
    sequences: RaggedBatch
    # (rows,) int64, on the host, or on the device and still being computed.
    token_ids: Tensor
    # Rows whose logits are returned; None for all.
    logit_rows: Ints | None = None
    # Sequences whose hidden states are summed, with their indices.
    embedded: Sequence[tuple[int, SlotState]] = ()


class Runner:
    """A model with its paged KV cache. On a CPU, the model's weights are repacked in place (`pack_linears`)."""

    def __init__(  # noqa: PLR0913 - keyword-only options
        self,
        model: CausalModel,
        num_blocks: int,
        block_size: int,
        *,
        tables: BlockTables | None = None,
        batch_invariant: bool = False,
        cache: CacheOptions | None = None,
    ) -> None:
        """Set up. CUDA graphs compute batches whose block tables are in `tables`; by default, one table of all blocks.

        Raises ConfigurationError if the backend does not support the model or `batch_invariant`.
        """
        cache = cache or CacheOptions()
        self.tables = tables or BlockTables(1, num_blocks)
        model.group.tell(NewRunner(num_blocks, len(self.tables.host), self.tables.width, cache))
        separate_experts(model)
        pack_linears(model, batch_invariant=batch_invariant)
        self.model = model
        self._least_rows = 1 if model.has_experts else least_rows(model)  # padding would read more experts
        self.block_size = block_size
        self._device = model.device
        spec = cache_spec(model, num_blocks, block_size, cache.dtype)
        self._backend, why = choose_backend(spec, cache.attention_backend, batch_invariant=batch_invariant)
        self._graphs: StepGraphs | None = None
        self._graph_limits: GraphLimits | None = None
        self._released = self._backend.cache.shape  # shape of the KV cache, which is empty while released
        self._compiled: CompiledDecoder | None = None
        _LOG.info("attention: %s (%s)", self._backend.name, why)
        if self._device.type == "cpu":
            load()  # compile the C kernels of norms and gates now, so that the first step need not wait
            if isinstance(model, Decoder) and self._backend.name == "native":
                self._compiled = compile_decoder(model)
            _LOG.info("layers: %s", "one C call for all" if self._compiled else "one kernel call per operation")

    @property
    def context_length(self) -> int:
        """Maximum tokens of a sequence, as the block tables allow."""
        return self.tables.width * self.block_size

    @property
    def attention_backend(self) -> BackendName:
        return self._backend.name

    def capture(self, limits: GraphLimits) -> None:
        """Capture steps without prompts as CUDA graphs, if the attention backend is Triton and the family native."""
        self.model.group.tell(Capture(limits.sequences, limits.draft_rows))
        self._graph_limits = limits
        if isinstance(self._backend, TritonBackend) and isinstance(self.model, Decoder):
            self._graphs = StepGraphs(self.model, self._backend, limits, self.tables, CudaRecorder())

    def release(self) -> None:
        """Free the KV cache, and move weights on a GPU to host memory. Call `restore` before the next step."""
        self.model.group.tell(Release())
        self._graphs = None
        self._backend.cache = self._backend.cache.new_empty(0)
        self.model.to("cpu")
        if self.runs_ahead:
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Undo `release`. The KV cache is empty."""
        self.model.group.tell(Restore())
        self.model.to(self._device)
        self._backend.cache = self._backend.cache.new_zeros(self._released)
        if self._graph_limits is not None:
            self.capture(self._graph_limits)

    def compute_zeros(self, rows: Sequence[int], num_logits: int) -> Tensor:
        """Compute sequences of `rows` zeros each on all ranks, outside a step. Overwrites the KV cache.

        Returns the logits of at most the last `num_logits` rows of each sequence, (rows, vocab) float32.
        """
        self.model.group.tell(ComputeZeros(list(rows), num_logits))
        batch = self.zeros(rows)
        sequence, number = batch.row_places
        logit_rows = np.flatnonzero(number >= (batch.rows - num_logits)[sequence])
        return self.compute(ForwardBatch(batch, torch.zeros(len(sequence), dtype=torch.int64), logit_rows))

    def zeros(self, rows: Sequence[int]) -> RaggedBatch:
        """Return a batch of sequences that begin at position 0, with `rows` each, all in the blocks of slot 0."""
        first = np.zeros(len(rows), np.int64)
        return RaggedBatch.in_tables(first, np.array(rows, np.int64), first, self.tables, self.block_size)

    @property
    def runs_ahead(self) -> bool:
        """Return whether the device is asynchronous. If so, launch the next step before reading the last one."""
        return self._device.type == "cuda"

    @torch.inference_mode()
    def compute(self, batch: ForwardBatch, unread: UnreadInputs | None = None) -> Tensor:
        """Compute a batch, store its keys and values, and return the logits of its `logit_rows` (rows, vocab) float32.

        Before the last stage, the logits are missing: (rows, 0).

        `unread` has the first tokens of sequences with unread results.
        """
        sequences, token_ids, shift = batch.sequences, batch.token_ids, None
        if unread is not None:
            rows = self._on_device(torch.from_numpy(sequences.first_row[unread.sequences]))
            token_ids = self._on_device(token_ids).index_copy(0, rows, unread.token_ids)
            shift = unread.shift(len(sequences.rows) - 1)
        num_logits = len(token_ids) if batch.logit_rows is None else len(batch.logit_rows)
        # A graph computes the logits of all rows, so it suits decodes and drafts, not prompts.
        if self._graphs is not None and not batch.embedded and 2 * num_logits >= len(token_ids):
            logits = self._graphs.run(sequences, token_ids, shift)
            if logits is not None:
                return self._rows(logits, batch.logit_rows)
        hidden = self._hidden_in_parts(sequences, token_ids, shift)
        if not self.model.group.is_last:
            return hidden.new_empty((num_logits, 0))
        for at, state in batch.embedded:
            first, number = int(sequences.first_row[at]), int(sequences.rows[at])
            state.add_hidden(hidden[first : first + number], int(sequences.position[at]))
        return self.model.logits(self._rows(hidden[: len(token_ids)], batch.logit_rows))

    def _hidden_in_parts(self, batch: RaggedBatch, token_ids: Tensor, shift: Tensor | None) -> Tensor:
        """Return `_hidden`. Among stages, large batches are computed in parts, so that all stages are busy at once.

        A stage begins a part while the next stage computes the part before (GPipe: Huang et al. 2019). Small batches
        stay whole, because each part reads all weights.
        """
        rows, stages = len(token_ids), self.model.group.num_stages
        num_parts = min(_PARTS_PER_STAGE * stages, rows // _PART_ROWS) if stages > 1 else 1
        if num_parts < 2:
            return self._hidden(batch, token_ids, shift)
        assert shift is None, "stages do not run ahead"
        edges = [rows * part // num_parts for part in range(num_parts + 1)]
        parts = [(batch.between(first, last), token_ids[first:last]) for first, last in pairwise(edges)]
        return torch.cat([self._hidden(part, ids, None)[: len(ids)] for part, ids in parts])

    def _hidden(self, batch: RaggedBatch, token_ids: Tensor, shift: Tensor | None) -> Tensor:
        """Return the hidden states (rows, hidden_size), including padding rows at the end.

        `shift`: by how much each sequence begins earlier.
        """
        num_rows = max(len(token_ids), self._least_rows)
        if shift is not None and not isinstance(self._backend, TritonBackend):
            batch, shift = batch.earlier(np.array(shift.tolist(), np.int64)), None
        batch = batch.padded(num_rows)
        positions = torch.from_numpy(batch.positions().clip(0))
        if num_rows > len(token_ids):
            token_ids = functional.pad(token_ids, (0, num_rows - len(token_ids)))
        if shift is not None:
            assert isinstance(self._backend, TritonBackend), "other backends get true positions"
            metadata = self._backend.planner.of_batch(batch)
            positions = metadata.shift_(batch, shift)
            return self.model(self._on_device(token_ids), positions, self._backend.attention(metadata))
        attention = self._backend.begin(batch)
        if self._compiled is not None and isinstance(attention, NativeAttention):
            return self._compiled(token_ids, positions, attention)
        return self.model(self._on_device(token_ids), self._on_device(positions), attention)

    @property
    def can_extend(self) -> bool:
        """Return whether `extend` is faster than separate passes with a wait after each."""
        return self.runs_ahead or (self._compiled is not None and self._compiled.can_continue)

    @torch.inference_mode()
    def extend(self, first: Sequence[int] | Tensor, batch: RaggedBatch, rows: SamplingRows) -> list[list[int]]:
        """Run several decode passes, but wait for the device only once. Each pass decodes the last pass's tokens.

        `first` are the input tokens of the first pass, which may still be in flight if the runner `runs_ahead`. `rows`
        are the sampling parameters for the outputs of the first pass, which are all plain. A sequence takes part in one
        pass per row of `batch`, which starts with the longest. Returns the sampled tokens of each sequence."""
        sampling = sampling_of(rows, self.model.config.vocab_size, self._device)
        passes = Passes.of(batch)
        if self._compiled is not None:
            attention = self._backend.begin(passes.batch)
            assert isinstance(attention, NativeAttention), "compiled layers need the native attention backend"
            return self._compiled.continued([int(token) for token in first], passes, attention, sampling)
        return self._extend_on_device(first, passes, sampling)

    def _extend_on_device(self, first: Sequence[int] | Tensor, passes: Passes, sampling: Sampling) -> list[list[int]]:
        token_ids = first if isinstance(first, Tensor) else self._on_device(torch.tensor(first, dtype=torch.int64))
        sampled: list[Tensor] = []
        for number, live in enumerate(passes.live.tolist()):
            position, table = passes.batch.position[:live] + number, passes.batch.table[:live]
            sequences = RaggedBatch.in_tables(
                position, np.ones_like(position), table, passes.batch.tables, self.block_size
            )
            logits = self.compute(ForwardBatch(sequences, token_ids[:live]))
            token_ids = sample_rows(logits, sampling.of(slice(live)).ahead(number))
            sampled.append(token_ids)
        continued: list[list[int]] = [[] for _ in range(int(passes.live[0]))]
        tokens: list[int] = HostCopy(torch.cat(sampled)).tolist()
        for sequence, token in zip(passes.sequence.tolist(), tokens, strict=True):
            continued[sequence].append(token)
        return continued

    def _rows(self, values: Tensor, rows: Ints | None) -> Tensor:
        if rows is None or len(rows) == len(values):
            return values
        return values.index_select(0, self._on_device(torch.from_numpy(rows)))

    def _on_device(self, staged: Tensor) -> Tensor:
        return to_device(staged, self._device)


def graph_limits(config: EngineConfig, most_rows: int = MAX_DRAFT_ROWS) -> GraphLimits | None:
    """Return the limits of steps to capture, at most `most_rows` rows in steps with drafts; None if eager."""
    if config.enforce_eager or config.pipeline_parallel > 1:
        return None
    draft_rows = min(most_rows, MAX_DRAFT_ROWS, config.max_num_batched_tokens)
    return GraphLimits(config.max_num_seqs, draft_rows)
