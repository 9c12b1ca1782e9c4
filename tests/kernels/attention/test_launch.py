"""The launch for each batch: tiles, splits and the list of work, as plain functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from updraft.kernels.attention.block_tables import BlockTables
from updraft.kernels.attention.launch import (
    AttentionShape,
    attention_launch,
    extra_splits,
    num_splits,
    programs_at_once,
    queries_per_tile,
    split_lengths,
)
from updraft.kernels.attention.metadata import AttentionPlanner, GraphMetadata, plan_attention
from updraft.kernels.attention.ragged_batch import RaggedBatch
from updraft.kernels.attention.types import QuerySpan
from updraft.protocol.errors import ConfigurationError

LLAMA_8B = AttentionShape(heads=32, kv_heads=8, head_dim=128, block_size=64)
H200 = 132


def tiles_for(shape: AttentionShape, queries: int) -> dict[str, int]:
    return dict(attention_launch(shape, queries).tiles)


def cut(keys: list[int], queries: int = 1) -> tuple[list[int], int]:
    """Pieces of each tile, and how many KV heads times splits the GPU takes at once."""
    lengths = np.array(keys, dtype=np.int64)
    launch = attention_launch(LLAMA_8B, queries)
    splits = num_splits(lengths, split_lengths(lengths, LLAMA_8B, launch, H200))
    assert splits.sum() <= len(keys) + extra_splits(LLAMA_8B, launch, H200)
    return splits.tolist(), programs_at_once(LLAMA_8B, launch, H200)


@pytest.mark.parametrize(("queries", "rows"), [(1, 16), (4, 16), (5, 32), (8, 32), (9, 64), (17, 128), (4096, 128)])
def test_tiles_hold_all_heads_of_all_queries_while_they_fit(queries: int, rows: int) -> None:
    assert tiles_for(LLAMA_8B, queries)["BLOCK_M"] == rows


def test_groups_of_any_size_fit_a_tile() -> None:
    for group in (1, 3, 7, 16, 71, 128):
        shape = AttentionShape(group, 1, head_dim=64, block_size=16)
        launch = attention_launch(shape, 1)
        assert queries_per_tile(shape, launch) >= 1
        assert launch.tiles["BLOCK_M"] >= group


def test_tiles_of_keys_keep_their_size_in_bytes() -> None:
    assert tiles_for(LLAMA_8B, 1)["BLOCK_N"] == 64
    assert tiles_for(AttentionShape(8, 8, 256, 64), 1)["BLOCK_N"] == 32
    assert tiles_for(AttentionShape(8, 8, 256, 64, cache_bytes=4), 1)["BLOCK_N"] == 16
    assert tiles_for(AttentionShape(8, 8, 64, 64, cache_bytes=1), 1)["BLOCK_N"] == 64


def shape_of(head_dim: int, group: int = 4, block: int = 64, cache_bytes: int = 2, windowed: bool = False):
    return AttentionShape(group, 1, head_dim, block, cache_bytes, windowed)


@pytest.mark.parametrize(
    ("shape", "queries", "expected"),  # rows, keys, warps
    [
        (shape_of(128), 1, (16, 64, 4)),
        (shape_of(128), 8, (32, 64, 4)),
        (shape_of(128), 9, (64, 64, 4)),
        (shape_of(128), 99, (128, 64, 8)),
        (shape_of(256), 99, (64, 32, 8)),
        # 64 rows of 128 leave no register for a window, or for a block of each key
        (shape_of(128, windowed=True), 8, (32, 64, 4)),
        (shape_of(128, windowed=True), 9, (64, 64, 8)),
        (shape_of(96, windowed=True), 9, (64, 64, 8)),
        (shape_of(64, windowed=True), 9, (64, 64, 4)),
        (shape_of(256, 2, windowed=True), 9, (32, 32, 4)),
        (shape_of(128, block=16), 8, (32, 64, 4)),
        (shape_of(128, block=16), 9, (64, 64, 8)),
        # FP8
        (shape_of(128, block=16, cache_bytes=1, windowed=True), 9, (64, 64, 4)),
        (shape_of(256, cache_bytes=1), 1, (16, 64, 4)),
        (shape_of(256, 2, cache_bytes=1), 9, (32, 32, 4)),
        (shape_of(256, cache_bytes=1), 99, (64, 32, 8)),
        # float32
        (shape_of(128, cache_bytes=4), 1, (16, 32, 4)),
        (shape_of(64, cache_bytes=4), 1, (16, 64, 4)),
        (shape_of(128, block=16, cache_bytes=4), 1, (16, 16, 4)),
        (shape_of(128, cache_bytes=4), 9, (32, 16, 8)),
        (shape_of(64, cache_bytes=4), 99, (32, 16, 8)),
        (shape_of(256, cache_bytes=4), 99, (32, 16, 8)),
    ],
    ids=str,
)
def test_launches_that_spill_nothing(shape: AttentionShape, queries: int, expected: tuple[int, int, int]) -> None:
    """`specs/paged_attention.py` compiles them."""
    launch = attention_launch(shape, queries)
    assert (launch.tiles["BLOCK_M"], launch.tiles["BLOCK_N"], launch.num_warps) == expected
    assert launch.num_stages == 3


def test_one_long_sequence_fills_the_gpu_once() -> None:
    splits, at_once = cut([32768])
    assert 0.9 * at_once <= 8 * splits[0] <= at_once


@pytest.mark.parametrize("keys", [[40], [2048] * 256, [8192] * 40])
def test_nothing_is_cut_where_that_would_only_cost(keys: list[int]) -> None:
    assert cut(keys)[0] == [1] * len(keys)


def test_nothing_is_cut_of_a_long_prefill() -> None:
    assert set(cut(list(range(32, 16385, 32)), queries=16384)[0]) == {1}


def test_only_the_long_one_of_many_is_cut() -> None:
    splits, _ = cut([100_000, *[500] * 255])
    assert splits[0] > 20
    assert set(splits[1:]) == {1}


def test_splits_are_even() -> None:
    lengths = split_lengths(np.array([8192] * 64), LLAMA_8B, attention_launch(LLAMA_8B, 1), H200)
    assert all(8192 % length == 0 for length in lengths.tolist())


@pytest.mark.parametrize("multiprocessors", [1, 20, 1000])
def test_work_covers_every_query_and_key_once(multiprocessors: int) -> None:
    """And slots, blocks and merges say what the spans say."""
    shape = AttentionShape(6, 2, head_dim=64, block_size=16)
    spans = [QuerySpan(700, 3, range(100, 150)), QuerySpan(0, 0, []), QuerySpan(5, 90, range(200, 206))]
    batch = RaggedBatch.of(spans, 100, 16)
    plan = plan_attention(batch, shape, attention_launch(shape, 90), multiprocessors)
    visits = np.zeros((100, 703), dtype=np.int64)
    partial = np.zeros(plan.partial_rows, dtype=np.int64)
    for table, row, rows, position, first, end, place, _ in plan.work.tolist():
        visits[row : row + rows, first:end] += 1
        if place >= 0:
            partial[place : place + rows] += 1
        if end:
            assert batch.blocks[table] == (100 if row < 3 else 200)
            assert position == (700 + row if row < 3 else 5 + row - 3)
    assert (partial == 1).all()
    assert (visits[:3] == 1).all()
    for row in range(3, 93):
        assert visits[row, : 5 + row - 2].min() == visits[row].max() == 1
    assert not visits[93:].any()
    assert plan.slots.tolist() == [
        *range(143 * 16 + 12, 143 * 16 + 15),
        *range(200 * 16 + 5, 200 * 16 + 95),
        *[-1] * 7,
    ]
    merged = {row: [first + split * step for split in range(n)] for row, first, step, n in plan.merges.tolist()}
    assert sorted(place for places in merged.values() for place in places) == list(range(plan.partial_rows))


def test_long_work_comes_first() -> None:
    spans = [QuerySpan(start, 1, range(100)) for start in (10, 1000, 50)]
    plan = plan_attention(RaggedBatch.of(spans, 3, LLAMA_8B.block_size), LLAMA_8B, attention_launch(LLAMA_8B, 1), 1)
    assert plan.work[:, 1].tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    "shape", [(32, 8, 128, 32), (32, 6, 128, 16), (32, 0, 128, 16), (129, 1, 64, 16), (8, 8, 512, 16), (8, 8, 40, 16)]
)
def test_shapes_that_the_kernel_does_not_take(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigurationError):
        AttentionShape(*shape)


@pytest.mark.parametrize("lengths", [[1, 1, 1, 1], [3, 3, 1, 1], [5, 3], [7], [8], [1, 0, 1, 5], []], ids=str)
def test_a_graph_serves_any_lengths(lengths: list[int]) -> None:
    """On a GPU so small that no more splits are planned for than there are tiles."""
    shape = AttentionShape(heads=128, kv_heads=8, head_dim=64, block_size=16)
    graph = GraphMetadata(AttentionPlanner(shape, torch.device("cpu"), 1), 9, 4, BlockTables(4, 4))
    assert len(graph.metadata.work) == 6
    graph.fill_(RaggedBatch.of([QuerySpan(16, length, [1, 2]) for length in lengths], 9, 16))
    assert graph.metadata.work[:, 2].sum() == 9
    assert (graph.metadata.slots >= 0).sum() == sum(lengths)


@pytest.mark.parametrize(
    "spans",
    [
        [QuerySpan(0, 9, [1])],
        [QuerySpan(0, 1, [1])] * 9,
    ],
    ids=["rows", "sequences"],
)
def test_oversized_batches_of_a_graph_are_refused(spans: list[QuerySpan]) -> None:
    shape = AttentionShape(4, 2, head_dim=64, block_size=16)
    graph = GraphMetadata(AttentionPlanner(shape, torch.device("cpu"), 8), 8, 4, BlockTables(4, 4))
    before = graph.metadata.work.clone()
    with pytest.raises(ConfigurationError):
        graph.fill_(RaggedBatch.of(spans, 8, 16))
    assert torch.equal(graph.metadata.work, before)
