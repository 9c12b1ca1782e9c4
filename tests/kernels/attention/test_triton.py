"""The attention kernel, interpreted, against the loop over sequences; that loop against torch's own attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from attention_reference import attend_reference
from slot_batches import slot_batch
from torch import Tensor
from torch.nn import functional
from updraft.kernels.attention.block_tables import BlockTables
from updraft.kernels.attention.launch import AttentionShape
from updraft.kernels.attention.metadata import AttentionMetadata, AttentionPlanner, GraphMetadata
from updraft.kernels.attention.types import QuerySpan, ScoreOptions

pytest.importorskip("triton")
from updraft.kernels.attention import triton as paged_attention_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ONE_PLACE = 1  # a GPU so small that nothing is worth cutting
MANY_PLACES = 1024
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}  # relative, and absolute below 1


@dataclass(frozen=True)
class Case:
    """A cache in which everything that must not be looked at is NaN, and the queries of `spans` over it."""

    shape: AttentionShape
    spans: list[QuerySpan]
    query: Tensor
    cache: Tensor

    def planner(self, multiprocessors: int = ONE_PLACE) -> AttentionPlanner:
        return AttentionPlanner(self.shape, DEVICE, multiprocessors)

    def attend(self, rule: ScoreOptions, metadata: AttentionMetadata | None = None) -> Tensor:
        return paged_attention_triton.attend(
            self.query, self.cache, metadata or self.planner().metadata(self.spans, len(self.query)), self.shape, rule
        )


@pytest.fixture(autouse=True)
def poisoned_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kernel does not write is NaN."""
    empty, new_empty = torch.empty, Tensor.new_empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: poisoned(empty(*size, **options)))
    monkeypatch.setattr(Tensor, "new_empty", lambda *size, **options: poisoned(new_empty(*size, **options)))


def poisoned(tensor: Tensor) -> Tensor:
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


def make_case(
    shape: AttentionShape,
    chunks: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    padding: int = 0,
) -> Case:
    """`chunks`: start and length of each sequence's queries."""
    generator = torch.Generator().manual_seed(len(chunks))
    sizes = [-(-(start + length) // shape.block_size) for start, length in chunks]
    order = (torch.randperm(sum(sizes), generator=generator) + 1).tolist()
    cache = torch.full((len(order) + 2, shape.block_size, 2 * shape.kv_heads, shape.head_dim), torch.nan)
    spans: list[QuerySpan] = []
    for (start, length), size in zip(chunks, sizes, strict=True):
        table, order = order[:size], order[size:]
        for token in range(start + length):
            block = table[token // shape.block_size]
            cache[block, token % shape.block_size] = torch.randn(cache.shape[2:], generator=generator)
        spans.append(QuerySpan(start, length, [*table, len(cache) - 1]))  # a block ahead of need is not read
    rows = sum(length for _, length in chunks) + padding
    projected = torch.randn(rows, shape.heads + 3, shape.head_dim, generator=generator).to(dtype)
    return Case(shape, spans, projected.to(DEVICE)[:, : shape.heads], cache.to(cache_dtype or dtype).to(DEVICE))


def check(case: Case, rule: ScoreOptions, *, multiprocessors: int = ONE_PLACE) -> AttentionMetadata:
    metadata = case.planner(multiprocessors).metadata(case.spans, len(case.query))
    given = case.attend(rule, metadata)
    expected = attend_reference(case.query, case.cache, case.spans, rule)
    assert given.dtype == case.query.dtype
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(given.float(), expected, rtol=tolerance, atol=tolerance)
    return metadata


MIXED = [(5, 1), (0, 0), (0, 21), (17, 4), (15, 1), (16, 1), (0, 1), (14, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (14, 2)], ids=str)
def test_any_mix_in_one_launch(heads: tuple[int, int], block_size: int, dtype: torch.dtype) -> None:
    shape = AttentionShape(*heads, head_dim=16, block_size=block_size, cache_bytes=dtype.itemsize)
    check(make_case(shape, MIXED, dtype=dtype), ScoreOptions(scale=0.25))


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_head_sizes(head_dim: int) -> None:
    shape = AttentionShape(2, 1, head_dim=head_dim, block_size=16)
    check(make_case(shape, [(30, 3), (0, 18)], dtype=torch.float16), ScoreOptions(scale=head_dim**-0.5))


@pytest.mark.parametrize("window", [1, 7, 64, 100, 1000])
@pytest.mark.parametrize(("block_size", "queries"), [(16, 1), (64, 70), (16, 70)])
def test_windows(window: int, block_size: int, queries: int) -> None:
    """With 70 queries in tiles of 64 rows, there are tiles before, within and behind all windows."""
    shape = AttentionShape(2, 2, head_dim=16, block_size=block_size)
    case = make_case(shape, [(130, queries), (63, 1)], dtype=torch.float16)
    check(case, ScoreOptions(scale=0.25, window=window))


@pytest.mark.parametrize("multiprocessors", [ONE_PLACE, MANY_PLACES])
def test_blocks_before_the_window_are_not_read(multiprocessors: int) -> None:
    shape = AttentionShape(2, 2, head_dim=16, block_size=64)
    case = make_case(shape, [(300, 1)], dtype=torch.float16)
    rule = ScoreOptions(scale=0.25, window=40)
    expected = case.attend(rule)
    case.cache[case.spans[0].block_table[:4]] = torch.nan
    metadata = case.planner(multiprocessors).metadata(case.spans)
    torch.testing.assert_close(case.attend(rule, metadata), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("chunk", [(120, 1), (120, 8), (97, 40)], ids=str)
def test_blocks_that_were_given_away_are_not_read(chunk: tuple[int, int]) -> None:
    """Their entries in the table are -1: what lies before the cache, or another layer's last block."""
    shape, rule = AttentionShape(2, 2, head_dim=16, block_size=16), ScoreOptions(scale=0.25, window=20)
    case = make_case(shape, [chunk], dtype=torch.float16)
    expected = case.attend(rule)
    both = torch.full((2, *case.cache.shape), torch.nan, dtype=torch.float16)
    both[1] = case.cache
    (span,) = case.spans
    gone = (span.start - 20 + 1) // 16
    spans = [replace(span, block_table=[-1] * gone + list(span.block_table[gone:]))]
    given = replace(case, cache=both[1], spans=spans).attend(rule)
    torch.testing.assert_close(given, expected, rtol=0, atol=0)


def test_fp8_cache() -> None:
    shape = AttentionShape(4, 2, head_dim=16, block_size=16, cache_bytes=1)
    case = make_case(shape, MIXED, dtype=torch.float16, cache_dtype=torch.float8_e4m3fn)
    check(case, ScoreOptions(scale=0.25, key_scale=0.5, value_scale=1.5))


@pytest.mark.parametrize("queries", [1, 3, 8])
@pytest.mark.parametrize("rule", [ScoreOptions(0.25), ScoreOptions(0.25, window=90)], ids=str)
def test_pieces_give_what_the_whole_gives(queries: int, rule: ScoreOptions) -> None:
    shape = AttentionShape(6, 2, head_dim=16, block_size=64)
    case = make_case(shape, [(500, queries), (10, 1), (192, queries), (191, 1)], dtype=torch.float16)
    metadata = check(case, rule, multiprocessors=MANY_PLACES)
    assert len(metadata.merges) >= queries
    assert not len(case.planner().metadata(case.spans).merges)
    torch.testing.assert_close(case.attend(rule, metadata), case.attend(rule), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("pieces", [1, 2, 16, 17, 40])
def test_any_number_of_pieces_is_merged(pieces: int, has_sinks: bool) -> None:
    """By weights that differ widely; a piece in which the window hides everything has next to none."""
    torch.manual_seed(pieces)
    rows, heads, head_dim = 2, 3, 80
    partial = torch.randn(pieces, rows, heads, head_dim, device=DEVICE)
    logs = torch.randn(pieces, rows, heads, device=DEVICE) * 30
    logs[0, 0], partial[0, 0] = -1e30, 0.0
    merges = torch.tensor([[3, 1, rows, pieces], [0, 0, rows, pieces], [0, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    out = torch.full((4, heads, head_dim), torch.nan, device=DEVICE)
    sinks = torch.tensor([-5.0, 1.0, 20.0], device=DEVICE)
    paged_attention_triton.merge_kernel[(heads, len(merges))](
        *(out, partial, logs, merges, sinks),
        **{"HEAD_DIM": head_dim, "PADDED_DIM": 128, "BLOCK_SPLITS": 16, "HAS_SINKS": has_sinks},
    )
    scores = logs.double() * math.log(2)
    if has_sinks:
        scores = torch.cat((scores, sinks.double().expand(1, rows, heads)))
    shares = scores.softmax(0)[:pieces, ..., None]
    expected = (partial * shares).sum(0).float()
    torch.testing.assert_close(out[[0, 3]], expected)
    assert out[1:3].isnan().all()


def test_prefill_is_cut_into_pieces_too() -> None:
    shape = AttentionShape(2, 2, head_dim=16, block_size=16)
    metadata = check(
        make_case(shape, [(700, 70)], dtype=torch.float16), ScoreOptions(0.25), multiprocessors=MANY_PLACES
    )
    assert len(metadata.merges) == 70


@pytest.mark.parametrize("multiprocessors", [ONE_PLACE, MANY_PLACES])
def test_padding_gets_zeros(multiprocessors: int) -> None:
    shape = AttentionShape(4, 2, head_dim=16, block_size=16)
    case = make_case(shape, [(300, 2), (3, 1)], dtype=torch.float16, padding=19)
    check(case, ScoreOptions(0.25), multiprocessors=multiprocessors)


def test_only_padding_and_nothing_at_all() -> None:
    shape = AttentionShape(4, 2, head_dim=16, block_size=16)
    case = make_case(shape, [], dtype=torch.float16, padding=3)
    assert not case.attend(ScoreOptions(0.25)).any()
    empty = replace(case, query=case.query[:0])
    assert empty.attend(ScoreOptions(0.25)).shape == (0, 4, 16)


def test_buffers_of_a_graph_serve_step_after_step() -> None:
    """Capacity beyond need, fewer sequences, and sequences with more queries than the graph was made for."""
    shape = AttentionShape(4, 2, head_dim=16, block_size=16)
    rule = ScoreOptions(0.25)
    tables = BlockTables(4, 40)
    graph = GraphMetadata(make_case(shape, [], dtype=torch.float16).planner(8), 8, 4, tables)
    addresses = [graph.metadata.work.data_ptr(), graph.metadata.blocks.data_ptr()]
    for chunks in ([(500, 2), (30, 2), (15, 2), (16, 2)], [(9, 1)], [], [(40, 1), (3, 7)]):
        rows = sum(length for _, length in chunks)
        case = make_case(shape, chunks, dtype=torch.float16, padding=8 - rows)
        graph.fill_(slot_batch(tables, case.spans, 8, 16))
        expected = attend_reference(case.query, case.cache, case.spans, rule)
        torch.testing.assert_close(case.attend(rule, graph.metadata).float(), expected, rtol=1e-3, atol=1e-3)
    assert addresses == [graph.metadata.work.data_ptr(), graph.metadata.blocks.data_ptr()]


def test_reference_is_torch_attention() -> None:
    shape = AttentionShape(4, 2, head_dim=16, block_size=16)
    case = make_case(shape, [(0, 37)])
    tokens = case.cache[case.spans[0].block_table].flatten(0, 1)[:37].transpose(0, 1)
    expected = functional.scaled_dot_product_attention(
        case.query.transpose(0, 1), tokens[:2], tokens[2:], is_causal=True, scale=0.3, enable_gqa=True
    )
    given = attend_reference(case.query, case.cache, case.spans, ScoreOptions(0.3))
    torch.testing.assert_close(given, expected.transpose(0, 1))
