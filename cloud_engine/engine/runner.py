"""Runs a model once over a ragged batch: any mix of prefill chunks, decodes and drafts, one row per token."""

# torch leaves `from_numpy` untyped
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.attention import QuerySpan
from ...kernels.attention_backends import CacheSpec, NativeBackend, TritonBackend, choose_backend
from ...kernels.backend import AttentionChoice, BackendName
from ...kernels.native_attention import NativeAttention
from ...kernels.native_library import load
from ...kernels.packed_linear import least_rows, pack_linears
from ...kernels.ragged_batch import Passes, RaggedBatch
from ..models.decoder import Decoder
from .config import EngineConfig
from .cuda_graphs import GraphLimits, StepGraphs
from .pooling import MeanPool
from .sampler import SamplingRow, sampling_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence, the first at position `start`. Logits are wanted of the last `num_logits`.

    `pool` takes in the hidden states of all of them.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    num_logits: int
    pool: MeanPool | None = None


class Runner:
    """A model with its paged KV cache, which belongs to the attention backend.

    The model's weights are rearranged for the CPU in place (`pack_linears`).
    """

    def __init__(
        self,
        model: Decoder,
        num_blocks: int,
        block_size: int,
        *,
        batch_invariant: bool = False,
        attention_backend: AttentionChoice = "auto",
    ) -> None:
        """Raises ConfigurationError if the backend cannot serve the model, or `batch_invariant` cannot be had."""
        pack_linears(model, batch_invariant=batch_invariant)
        self.model = model
        self._least_rows = least_rows(model)
        self._block_size = block_size
        self._device = model.embed_tokens.weight.device
        spec = cache_spec(model, num_blocks, block_size)
        self._backend, why = choose_backend(spec, attention_backend, batch_invariant=batch_invariant)
        self._graphs: StepGraphs | None = None
        _LOG.info("attention: %s (%s)", self._backend.name, why)
        if self._device.type == "cpu":
            load()  # norms and gates are in C, too: better compiled now than in the first step
            fused = self._backend.name == "native" and self.model.fuse()
            _LOG.info("layers: %s", "one call of C for all" if fused else "one kernel after the other")

    @property
    def attention_backend(self) -> BackendName:
        return self._backend.name

    def capture(self, limits: GraphLimits) -> None:
        """Capture steps without prompts as CUDA graphs, where attention can be: a matter of seconds."""
        if isinstance(self._backend, TritonBackend):
            self._graphs = StepGraphs(self.model, self._backend, limits)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute all chunks, store their keys and values, return logits (sum of num_logits, vocab) float32."""
        spans = [QuerySpan(chunk.start, len(chunk.token_ids), chunk.block_table) for chunk in chunks]
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        num_rows = max(len(token_ids), self._least_rows)
        batch = RaggedBatch.of(spans, num_rows, self._block_size)
        positions = torch.from_numpy(batch.positions().clip(0))
        wanted = _wanted_rows(chunks)
        if self._graphs is not None and all(chunk.pool is None for chunk in chunks):
            logits = self._graphs.run(spans, token_ids, positions)
            if logits is not None:
                return self._rows(logits, wanted)
        hidden = self.model(
            self._on_device(torch.tensor(token_ids + [0] * (num_rows - len(token_ids)))),
            self._on_device(positions),
            self._backend.begin(batch),
        )
        _pool(chunks, hidden)
        return self.model.logits(self._rows(hidden, wanted))

    @property
    def can_extend(self) -> bool:
        return self.model.can_continue and isinstance(self._backend, NativeBackend)

    @torch.inference_mode()
    def extend(self, first: Sequence[int], spans: Sequence[QuerySpan], rows: Sequence[SamplingRow]) -> list[list[int]]:
        """A pass for each row of the longest of `spans`, in one call, where `can_extend`: what was sampled in one is
        computed in the next. Begins with the tokens `first`, and returns those that were sampled, as many as each span
        is long; none may be longer than the one before it. `rows`: how to sample in the first pass, all plain ones.
        """
        passes = Passes.of(spans, self._block_size)
        attention = self._backend.begin(passes.batch)
        assert isinstance(attention, NativeAttention), "ask can_extend first"
        sampling = sampling_of(rows, self.model.config.vocab_size, self._device)
        return self.model.continued(first, passes, attention, sampling)

    def _rows(self, values: Tensor, wanted: list[int]) -> Tensor:
        if len(wanted) == len(values):
            return values
        return values.index_select(0, self._on_device(torch.tensor(wanted, dtype=torch.int64)))

    def _on_device(self, staged: Tensor) -> Tensor:
        """Through pinned memory where that is a copy, so that nothing waits for it."""
        return staged.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else staged

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each, in all layers; all sources are read before a target is written."""
        sources, targets = (torch.tensor(blocks, device=self._device) for blocks in zip(*copies, strict=True))
        cache = self._backend.cache
        cache[:, targets] = cache[:, sources]


def _pool(chunks: Sequence[Chunk], hidden: Tensor) -> None:
    row = 0
    for chunk in chunks:
        if chunk.pool is not None:
            chunk.pool.add(hidden[row : row + len(chunk.token_ids)], chunk.start)
        row += len(chunk.token_ids)


def _wanted_rows(chunks: Sequence[Chunk]) -> list[int]:
    """Those that logits are asked of."""
    rows: list[int] = []
    end = 0
    for chunk in chunks:
        end += len(chunk.token_ids)
        rows.extend(range(end - chunk.num_logits, end))
    return rows


def cache_spec(model: Decoder, num_blocks: int, block_size: int) -> CacheSpec:
    config, weight = model.config, model.embed_tokens.weight
    return CacheSpec(
        config.num_layers,
        num_blocks,
        block_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        weight.dtype,
        weight.device,
    )


def graph_limits(context_length: int, num_drafts: int, config: EngineConfig) -> GraphLimits:
    """Of an engine's steps without prompts, with at most `num_drafts` draft tokens for a sequence."""
    return GraphLimits(config.max_batch_size, 1 + num_drafts, -(-context_length // config.block_size))


def block_bytes(model: Decoder, block_size: int) -> int:
    """Memory of one KV block over all layers."""
    config = model.config
    elements = config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim
    return elements * model.embed_tokens.weight.element_size()
