"""Runs a model once over a ragged batch: any mix of prefill chunks, decodes and drafts, one row per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.attention import Attention, QuerySpan
from ...kernels.native_attention import NativeAttention, can_attend
from ...kernels.packed_linear import least_rows, pack_linears
from ...kernels.paged_attention import PagedAttention
from ..models.decoder import Decoder
from .pooling import MeanPool


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
    """A model with its paged KV cache: (layers, num_blocks, 2 * kv_heads, block_size, head_dim), keys then values.

    The model's weights are rearranged for the CPU in place (`pack_linears`).
    """

    def __init__(self, model: Decoder, num_blocks: int, block_size: int, *, batch_invariant: bool = False) -> None:
        pack_linears(model, batch_invariant=batch_invariant)
        self.model = model
        self._block_size = block_size
        self._batch_invariant = batch_invariant
        self._least_rows = least_rows(model)
        self._shared = model.config.num_heads // model.config.num_kv_heads
        weight = model.embed_tokens.weight
        config = model.config
        shape = (config.num_layers, num_blocks, 2 * config.num_kv_heads, block_size, config.head_dim)
        self._cache = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self._not_native = can_attend(self._cache)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute all chunks, store their keys and values, return logits (sum of num_logits, vocab) float32."""
        device = self._cache.device
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        for chunk in chunks:
            end = chunk.start + len(chunk.token_ids)
            token_ids.extend(chunk.token_ids)
            positions.extend(range(chunk.start, end))
            slots.extend(self._slots(chunk.block_table, chunk.start, end))
            wanted.extend(range(len(token_ids) - chunk.num_logits, len(token_ids)))
        spans = [QuerySpan(chunk.start, len(chunk.token_ids), chunk.block_table) for chunk in chunks]
        padding = [0] * (self._least_rows - len(token_ids))
        attention = self._attention(spans, torch.tensor(slots + [-1] * len(padding), device=device))
        hidden = self.model(
            torch.tensor(token_ids + padding, device=device),
            torch.tensor(positions + padding, device=device),
            attention,
        )
        _pool(chunks, hidden)
        return self.model.logits(hidden if len(wanted) == len(hidden) else hidden[wanted])

    def _attention(self, spans: Sequence[QuerySpan], slots: Tensor) -> Attention:
        if self._not_native is None:
            return NativeAttention(self._cache, spans, slots, shared=self._shared)
        return PagedAttention(self._cache, spans, slots, shared=self._shared, batch_invariant=self._batch_invariant)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each, in all layers; all sources are read before a target is written."""
        sources, targets = (torch.tensor(blocks, device=self._cache.device) for blocks in zip(*copies, strict=True))
        self._cache[:, targets] = self._cache[:, sources]

    def _slots(self, block_table: Sequence[int], start: int, end: int) -> list[int]:
        size = self._block_size
        return [block_table[position // size] * size + position % size for position in range(start, end)]


def _pool(chunks: Sequence[Chunk], hidden: Tensor) -> None:
    row = 0
    for chunk in chunks:
        if chunk.pool is not None:
            chunk.pool.add(hidden[row : row + len(chunk.token_ids)], chunk.start)
        row += len(chunk.token_ids)


def block_bytes(model: Decoder, block_size: int) -> int:
    """Memory of one KV block over all layers."""
    config = model.config
    elements = config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim
    return elements * model.embed_tokens.weight.element_size()
