"""The two implementations of attention for CPUs, plain torch and C, against the definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from attention_reference import attend_reference
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from updraft.kernels.attention.block_tables import BlockTables
from updraft.kernels.attention.cpu import NativeAttention, why_not_native
from updraft.kernels.attention.ragged_batch import RaggedBatch
from updraft.kernels.attention.torch_attention import TorchAttention
from updraft.kernels.attention.types import Attention, LayerAttention, QuerySpan, ScoreOptions
from updraft.kernels.kv_cache.reference import write_kv_reference_
from updraft.kernels.kv_cache.types import HeadNorms, HeadTransform, Rotation
from updraft.kernels.runtime.native_library import load
from updraft.protocol.errors import ConfigurationError

BLOCK = 16
#: Of (position of the first query, number of queries).
Chunks = Sequence[tuple[int, int]]
BATCHES: list[Chunks] = [
    [(0, 1)],
    [(15, 1), (16, 1), (130, 1)],  # decodes around block borders
    [(0, 37), (63, 5), (64, 1)],  # prefill, verification and decode
    [(70, 90)],
    [(number * 7, 1) for number in range(40)],
]
needs_c = pytest.mark.skipif(load() is None, reason="no C compiler")
IMPLEMENTATIONS = [TorchAttention, pytest.param(NativeAttention, marks=needs_c)]


def in_words(cache: Tensor) -> Tensor:
    """The C kernel's order within (layers, blocks, 2 * kv_heads, block, dim): sixteen positions at a time, keys as
    (words, positions), values as (words of positions, dim)."""
    layers, blocks, parts, block, dim = cache.shape
    word = 4 // cache.element_size()
    keys, values = cache.chunk(2, dim=2)
    keys = keys.reshape(layers, blocks, parts // 2, block // 16, 16, dim // word, word).transpose(4, 5)
    values = values.reshape(layers, blocks, parts // 2, block // 16, 16 // word, word, dim).transpose(5, 6)
    return torch.cat((keys.reshape(cache.chunk(2, dim=2)[0].shape), values.reshape(cache.chunk(2, dim=2)[0].shape)), 2)


class Batch:
    """A batch over a cache whose blocks lie anywhere; NaN wherever nothing of these sequences is."""

    def __init__(self, chunks: Chunks, *, heads: tuple[int, int] = (4, 2), dim: int = 32, block: int = BLOCK) -> None:
        self.heads, self.kv_heads = heads
        counts = [-(-(start + length) // block) for start, length in chunks]
        order = (torch.randperm(sum(counts)) + 1).tolist()
        tables = [[order.pop() for _ in range(count)] for count in counts]
        self.spans = [QuerySpan(start, length, table) for (start, length), table in zip(chunks, tables, strict=True)]
        self.slots = torch.tensor(
            [
                span.block_table[position // block] * block + position % block
                for span in self.spans
                for position in range(span.start, span.start + span.length)
            ]
        )
        self.cache = torch.full((1, sum(counts) + 2, block, 2 * self.kv_heads, dim), torch.nan)  # as attend_reference's
        for span in self.spans:
            for position in range(span.start):
                slot = span.block_table[position // block], position % block
                self.cache[0][slot] = torch.randn(2 * self.kv_heads, dim)
        self.num_rows = len(self.slots)
        self.batch: RaggedBatch | None = None  # None: a batch of the spans
        self.projected = torch.randn(self.num_rows, self.heads + 2 * self.kv_heads, dim)

    def attend(
        self,
        implementation: type[TorchAttention | NativeAttention],
        layer: LayerAttention,
        rotation: Rotation | None = None,
        norms: HeadNorms | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        cache = self.cache.transpose(2, 3).contiguous().to(dtype)
        return (
            self.on(implementation, cache).attend(layer, self.projected.to(dtype, copy=True), rotation, norms).float()
        )

    def on(self, implementation: type[TorchAttention | NativeAttention], cache: Tensor) -> Attention:
        shared = self.heads // self.kv_heads
        batch = self.batch or RaggedBatch.of(self.spans, self.num_rows, cache.shape[3])
        if implementation is NativeAttention:
            return NativeAttention(in_words(cache), batch, group_size=shared)
        return TorchAttention(cache, batch, group_size=shared)

    def expected(
        self, layer: LayerAttention, rotation: Rotation | None = None, norms: HeadNorms | None = None
    ) -> Tensor:
        projected, cache = self.projected.clone(), self.cache[0].clone()
        write_kv_reference_(projected, cache, self.slots, HeadTransform(norms), rotation)
        rule = ScoreOptions(layer.scale, layer.window, sinks=layer.sinks)
        return attend_reference(projected[:, : self.heads], cache, self.spans, rule)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize("chunks", BATCHES)
def test_batches(implementation: type[TorchAttention], chunks: Chunks, window: int | None) -> None:
    torch.manual_seed(0)
    batch, layer = Batch(chunks), LayerAttention(0, 0.3, window)
    torch.testing.assert_close(batch.attend(implementation, layer), batch.expected(layer), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("chunks", BATCHES)
def test_sinks_join_the_softmax(implementation: type[TorchAttention], chunks: Chunks, window: int | None) -> None:
    torch.manual_seed(0)
    batch, sinks = Batch(chunks), torch.tensor([-3.0, 0.5, 8.0, 300.0])
    layer = LayerAttention(0, 0.3, window, sinks)
    given = batch.attend(implementation, layer)
    torch.testing.assert_close(given, batch.expected(layer), rtol=2e-5, atol=2e-6)
    assert not given[:, 3].any(), "a sink far above all scores leaves nothing for the values"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (14, 2), (6, 6)])
@pytest.mark.parametrize(("dim", "block"), [(16, 64), (64, 16), (80, 16), (128, 64), (256, 16)])
def test_shapes(implementation: type[TorchAttention], heads: tuple[int, int], dim: int, block: int) -> None:
    torch.manual_seed(0)
    batch = Batch([(0, 19), (100, 3), (63, 1)], heads=heads, dim=dim, block=block)
    layer = LayerAttention(0, dim**-0.5)
    torch.testing.assert_close(batch.attend(implementation, layer), batch.expected(layer), rtol=2e-5, atol=3e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_bfloat16_is_as_exact_as_its_rounding(implementation: type[TorchAttention], dim: int) -> None:
    torch.manual_seed(0)
    batch = Batch([(0, 40), (200, 1), (130, 4)], dim=dim)
    batch.projected, batch.cache = batch.projected.bfloat16().float(), batch.cache.bfloat16().float()
    layer = LayerAttention(0, dim**-0.5)
    given, expected = batch.attend(implementation, layer, dtype=torch.bfloat16).float(), batch.expected(layer)
    assert ((given - expected).norm() / expected.norm()).item() < 3e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("pairs", [16, 5])
def test_heads_are_normed_and_rotated(implementation: type[TorchAttention], pairs: int, unit_offset: bool) -> None:
    torch.manual_seed(0)
    batch, layer = Batch([(3, 20), (40, 1)]), LayerAttention(0, 0.2)
    angles = torch.rand(21, pairs) * 6
    rotation = Rotation(angles.cos(), angles.sin())
    norms = HeadNorms(torch.randn(32), torch.randn(32), 1e-6, unit_offset)
    given = batch.attend(implementation, layer, rotation, norms)
    torch.testing.assert_close(given, batch.expected(layer, rotation, norms), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_padding(implementation: type[TorchAttention]) -> None:
    torch.manual_seed(0)
    batch = Batch([(0, 2)])
    expected = batch.expected(LayerAttention(0, 1.0))
    batch.projected = torch.cat((batch.projected, torch.full((2, 8, 32), torch.nan)))
    batch.num_rows += 2
    given = batch.attend(implementation, LayerAttention(0, 1.0))
    assert not given[2:].any()
    torch.testing.assert_close(given[:2], expected)


@needs_c
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1, max_size=6), st.integers(0, 90))
def test_any_batch_in_c(chunks: Chunks, window: int) -> None:
    torch.manual_seed(len(chunks))
    batch, layer = Batch(chunks, heads=(6, 2)), LayerAttention(0, 0.2, window or None)
    torch.testing.assert_close(batch.attend(NativeAttention, layer), batch.expected(layer), rtol=2e-5, atol=3e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("chunks", BATCHES)
def test_tables_may_be_rows_of_a_larger_array(implementation: type[TorchAttention], chunks: Chunks) -> None:
    """In any order, beside tables of other sequences, and with unused entries."""
    torch.manual_seed(0)
    batch, layer = Batch(chunks), LayerAttention(0, 0.3)
    expected, together = batch.attend(implementation, layer), RaggedBatch.of(batch.spans, batch.num_rows, BLOCK)
    places = torch.randperm(len(chunks) + 3)[: len(chunks)].numpy()
    tables = BlockTables(len(chunks) + 3, 3 + max(len(span.block_table) for span in batch.spans))
    for place, span in zip(places, batch.spans, strict=True):
        tables.replace([(int(place), 0, span.block_table)])
    position, rows = np.array(chunks).T
    apart = RaggedBatch.in_tables(position, rows, places * tables.width, tables, BLOCK)
    batch.batch = apart
    assert torch.equal(batch.attend(implementation, layer), expected)
    assert apart.slots().tolist() == together.slots().tolist() and apart.spans == together.spans
    padded = apart.padded(batch.num_rows + 2)
    assert padded.slots().tolist() == [*together.slots().tolist(), -1, -1]
    assert padded.positions().tolist() == [*together.positions().tolist(), -2, -1]


@needs_c
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c_gives_a_row_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype, window: int | None) -> None:
    torch.manual_seed(0)
    batch, layer = Batch([(33, 70), (5, 9), (90, 1)]), LayerAttention(0, 0.3, window)
    cache = in_words(batch.cache.transpose(2, 3).contiguous().to(dtype))
    together = NativeAttention(cache, RaggedBatch.of(batch.spans, batch.num_rows, BLOCK), group_size=2)
    expected = together.attend(layer, batch.projected.to(dtype), None)
    row = 0
    for span in batch.spans:
        for index in range(span.length):
            alone = QuerySpan(span.start + index, 1, span.block_table)
            attention = NativeAttention(cache, RaggedBatch.of([alone], 1, BLOCK), group_size=2)
            given = attention.attend(layer, batch.projected[row : row + 1].to(dtype), None)
            assert torch.equal(given[0], expected[row])
            row += 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", [0, 2])  # a key, a value
def test_nan_propagates(implementation: type[TorchAttention], part: int, broken: float) -> None:
    torch.manual_seed(0)
    batch = Batch([(70, 1), (40, 2)])
    for head_part in (part, part + 1):
        batch.cache[0, batch.spans[0].block_table[1], 3, head_part] = broken
    given = batch.attend(implementation, LayerAttention(0, 0.3))
    assert not given[0].isfinite().all()
    assert given[1:].isfinite().all()  # the other sequence has nothing to do with it


def test_unsupported_shapes_are_named() -> None:
    cpu = torch.device("cpu")
    assert "multiples" in (why_not_native(cpu, torch.float32, 16, 24) or "")
    assert "multiples" in (why_not_native(cpu, torch.float32, 8, 32) or "")
    assert "float16" in (why_not_native(cpu, torch.float16, 16, 32) or "")
    assert "meta" in (why_not_native(torch.device("meta"), torch.float32, 16, 32) or "")


@needs_c
def test_heads_that_do_not_fit_are_refused() -> None:
    batch = Batch([(0, 4)])
    for projected in (torch.randn(3, 8, 32), torch.randn(4, 8, 16), torch.randn(4, 32, 8).transpose(1, 2)):
        batch.projected = projected
        with pytest.raises(ConfigurationError):
            batch.attend(NativeAttention, LayerAttention(0, 1.0))
