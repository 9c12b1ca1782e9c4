"""Checks Triton attention over a paged KV cache against a float64 result, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from slot_batches import slot_batch
from torch import Tensor
from updraft.kernels.attention.block_tables import BlockTables
from updraft.kernels.attention.launch import AttentionShape
from updraft.kernels.attention.metadata import AttentionPlanner, GraphMetadata
from updraft.kernels.attention.triton_attention import TritonAttention
from updraft.kernels.attention.types import CacheScales, LayerAttention, QuerySpan

#: For each sequence: number of tokens that are already in the cache, and number of new tokens.
Chunks = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Place:
    """Device, compute dtype and cache dtype of a check."""

    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype

    @property
    def scales(self) -> CacheScales | None:
        return CacheScales(0.5, 2.0) if self.cache_dtype == torch.float8_e4m3fn else None


def filled_cache(shape: AttentionShape, chunks: Chunks, place: Place) -> tuple[list[QuerySpan], Tensor]:
    """Return spans for `chunks`, and a one-layer cache with random values for cached tokens, and NaN elsewhere.

    The blocks of the sequences are in random order.
    """
    sizes = [-(-(start + length) // shape.block_size) for start, length in chunks]
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(0)).tolist()
    block = (shape.block_size, 2 * shape.kv_heads, shape.head_dim)
    cache = torch.full((1, sum(sizes) + 1, *block), torch.nan, device=place.device).to(place.cache_dtype)
    spans: list[QuerySpan] = []
    for (start, length), size in zip(chunks, sizes, strict=True):
        table, order = order[:size], order[size:]
        spans.append(QuerySpan(start, length, table))
        tokens = torch.randn(start, *block[1:], device=place.device).to(place.cache_dtype)
        for index in range(0, start, shape.block_size):
            part = tokens[index : index + shape.block_size]
            cache[0, table[index // shape.block_size], : len(part)] = part
    return spans, cache


def exact(
    query: Tensor, cache: Tensor, spans: Sequence[QuerySpan], layer: LayerAttention, scales: CacheScales
) -> Tensor:
    """Compute attention in float64, one sequence and one head at a time, over one layer's `cache`."""
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    kv_heads = cache.shape[2] // 2
    shared = query.shape[1] // kv_heads
    row = 0
    for span in spans:
        rows, end = slice(row, row + span.length), span.start + span.length
        row += span.length
        table = torch.tensor(span.block_table, dtype=torch.int64, device=query.device)
        tokens = cache[table].flatten(0, 1)[:end].double()
        positions = torch.arange(span.start, end, device=query.device)[:, None]
        keys = torch.arange(end, device=query.device)
        hidden = keys > positions
        if layer.window is not None:
            hidden |= keys <= positions - layer.window
        for head in range(query.shape[1]):
            key, value = tokens[:, head // shared] * scales.key, tokens[:, kv_heads + head // shared] * scales.value
            scores = query[rows, head].double() @ key.T * layer.scale
            scores = scores.masked_fill(hidden, -torch.inf)
            if layer.sinks is not None:
                scores = torch.cat((scores, layer.sinks[head].double().expand(span.length, 1)), -1)
            out[rows, head] = scores.softmax(-1)[:, :end] @ value
    return out


def attention_error(
    shape: AttentionShape, chunks: Chunks, place: Place, window: int | None, *, has_sinks: bool = False
) -> float:
    """Return the relative error of a batch with three rows of padding. Asserts that these rows get zeros."""
    spans, cache = filled_cache(shape, chunks, place)
    rows = sum(span.length for span in spans)
    heads = shape.heads + 2 * shape.kv_heads
    projected = torch.randn(rows + 3, heads, shape.head_dim, device=place.device).to(place.dtype)
    query = projected[:, : shape.heads].clone()
    sinks = torch.randn(shape.heads, device=place.device) * 3 if has_sinks else None
    layer, scales = LayerAttention(0, shape.head_dim**-0.5, window, sinks), place.scales
    metadata = AttentionPlanner.on(place.device, shape).metadata(spans, rows + 3)
    output = TritonAttention(cache, metadata, shape, scales=scales).attend(layer, projected, None)
    assert not output[rows:].any()
    expected = exact(query, cache[0], spans, layer, scales or CacheScales())
    return float((output - expected)[:rows].norm() / expected[:rows].norm())


class ReplayedAttention:
    """Attention over eight rows that is planned anew between runs, in buffers of fixed size as for a CUDA graph."""

    def __init__(self, shape: AttentionShape, chunks: Chunks, place: Place) -> None:
        self.spans, self._cache = filled_cache(shape, chunks, place)
        self._shape, self._layer = shape, LayerAttention(0, shape.head_dim**-0.5)
        planner = AttentionPlanner.on(place.device, shape)
        blocks = max(len(span.block_table) for span in self.spans)
        self._tables = BlockTables(8, blocks)
        self._buffers = GraphMetadata(planner, 8, 8, self._tables)
        self._attention = TritonAttention(self._cache, self._buffers.metadata, shape)
        heads = shape.heads + 2 * shape.kv_heads
        self._projected = torch.randn(8, heads, shape.head_dim, device=place.device).to(place.dtype)

    def compute(self) -> Tensor:
        return self._attention.attend(self._layer, self._projected, None)

    def plan(self, spans: Sequence[QuerySpan]) -> None:
        self._buffers.fill_(slot_batch(self._tables, spans, 8, self._shape.block_size))

    def error(self, output: Tensor, spans: Sequence[QuerySpan]) -> float:
        """Return the relative error over the rows of `spans`. Asserts that all other rows get zeros."""
        rows = sum(span.length for span in spans)
        assert not output[rows:].any()
        query = self._projected[:, : self._shape.heads]
        expected = exact(query, self._cache[0], spans, self._layer, CacheScales())
        return float((output - expected).norm() / expected.norm().clamp(min=1e-9))
