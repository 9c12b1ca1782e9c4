"""The captured step of a batch, and its results: repeated by hand here, as a CUDA graph on a GPU."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from forward_chunks import Chunk, batch_of, compute
from hypothesis import given
from hypothesis import strategies as st
from slot_batches import slot_batch
from updraft.cloud_engine.engine.config import CacheOptions
from updraft.cloud_engine.engine.kv.sizing import cache_spec
from updraft.cloud_engine.engine.worker.cuda_graphs import (
    MAX_DRAFT_ROWS,
    GraphLimits,
    GraphSize,
    StepGraphs,
    graph_sizes,
    smallest_size,
)
from updraft.cloud_engine.engine.worker.launched_step import UnreadInputs
from updraft.cloud_engine.engine.worker.model_runner import ForwardBatch, Runner
from updraft.kernels.attention.block_tables import BlockTables
from updraft.kernels.attention.ops import TritonBackend
from updraft.kernels.attention.ragged_batch import RaggedBatch
from updraft.kernels.attention.types import QuerySpan

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported

LIMITS = st.builds(GraphLimits, st.integers(1, 600), st.integers(1, MAX_DRAFT_ROWS))


def test_a_ladder() -> None:
    assert graph_sizes(GraphLimits(6, 1)) == [GraphSize(1, 1), GraphSize(2, 2), GraphSize(4, 4), GraphSize(6, 6)]
    verified = [size for size in graph_sizes(GraphLimits(20, 40)) if size.rows > size.sequences]
    assert verified == [
        GraphSize(16, 1),
        GraphSize(16, 4),
        GraphSize(32, 1),
        GraphSize(32, 4),
        GraphSize(32, 16),
        GraphSize(32, 20),
        GraphSize(40, 1),
        GraphSize(40, 4),
        GraphSize(40, 16),
        GraphSize(40, 20),
    ]


@given(LIMITS, st.data())
def test_every_step_within_the_limits_has_a_graph(limits: GraphLimits, data: st.DataObject) -> None:
    sequences = data.draw(st.integers(1, limits.sequences))
    rows = data.draw(st.integers(sequences, max(sequences, limits.draft_rows)))
    sizes = graph_sizes(limits)
    size = smallest_size(sizes, rows, sequences)
    assert size is not None and size.rows >= rows and size.sequences >= sequences
    assert all(other.rows >= size.rows for other in sizes if other.rows >= rows and other.sequences >= sequences)


@given(LIMITS)
def test_few_graphs_and_none_too_many_rows(limits: GraphLimits) -> None:
    sizes = graph_sizes(limits)
    assert len(sizes) <= 60
    assert max(size.rows for size in sizes) == limits.rows


@pytest.mark.parametrize(("rows", "sequences"), [(6, 4), (5, 5)])
def test_oversized_batches_run_without_a_graph(rows: int, sequences: int) -> None:
    assert smallest_size(graph_sizes(GraphLimits(4, 5)), rows, sequences) is None


TABLES = [[3, 1, 5], [2, 4, 0], [7, 6, 8]]
#: (start, tokens) of each sequence, by its table.
PROMPTS = [(0, [5, 80, 3, 17] * 5), (0, [9, 2, 7]), (0, list(range(40, 56)))]
STEPS: list[list[tuple[int, int, list[int]]]] = [  # (sequence, start, tokens): decodes, then drafts, then fewer
    [(0, 20, [1]), (1, 3, [2])],
    [(0, 21, [4]), (1, 4, [6]), (2, 16, [90])],
    [(0, 22, [11, 12]), (1, 5, [13]), (2, 17, [14, 15])],
    [(2, 19, [33]), (1, 6, list(range(20, 31)))],  # more drafts than a tile of the graph holds
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="not interpreted")
def test_captured_steps_are_those_of_the_model(target) -> None:
    """Leftovers of a step in the buffers are not seen by the next; tokens may be on the device already."""
    pytest.importorskip("triton")
    backend = TritonBackend(cache_spec(target, 9, 16))
    runner = Runner(target, 9, 16, cache=CacheOptions("torch"))
    prompts = [Chunk(tokens, start, table, 1) for (start, tokens), table in zip(PROMPTS, TABLES, strict=True)]
    compute(runner, prompts)
    with torch.inference_mode():
        batch = batch_of(prompts, 16)
        positions = torch.from_numpy(batch.sequences.positions())
        target(batch.token_ids, positions, backend.begin(batch.sequences))
        tables = BlockTables(3, 3)
        graphs = StepGraphs(target, backend, GraphLimits(3, 12), tables, lambda compute: compute)
        for step in STEPS:
            chunks = [Chunk(tokens, start, TABLES[number], len(tokens)) for number, start, tokens in step]
            token_ids = batch_of(chunks, 16).token_ids
            batch = slot_batch(tables, [chunk.span for chunk in chunks], len(token_ids), 16)
            given = graphs.run(batch, token_ids)
            torch.testing.assert_close(given, expected := compute(runner, chunks), rtol=1e-4, atol=1e-5)
            # The same step, planned for the case that three drafts more are accepted than really are.
            ahead = [3 * (chunk.start == chunks[-1].start) for chunk in chunks]
            given = graphs.run(batch.earlier(-np.array(ahead)), token_ids, torch.tensor(ahead))
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
        too_many = slot_batch(tables, [QuerySpan(24, 13, TABLES[0])], 13, 16)
        assert graphs.run(too_many, torch.arange(13)) is None
        other_tables = RaggedBatch.of([QuerySpan(24, 1, TABLES[0])], 1, 16)
        assert graphs.run(other_tables, torch.arange(1)) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="not interpreted")
@pytest.mark.parametrize("kind", ["triton", "torch"])
def test_unread_tokens_and_positions_are_resolved_on_the_device(kind: str, target) -> None:
    """One sequence begins earlier than planned, one where it was planned with an unread token, and one is new."""
    pytest.importorskip("triton")
    plain, runner = (Runner(target, 9, 16, cache=CacheOptions("torch")) for _ in range(2))
    if kind == "triton":
        runner._backend = TritonBackend(cache_spec(target, 9, 16))
    prompts = [Chunk(tokens, start, table, 1) for (start, tokens), table in zip(PROMPTS, TABLES, strict=True)]
    for each in (plain, runner):
        compute(each, prompts[:2])
    true = [Chunk([1, 50, 51], 20, TABLES[0], 3), Chunk([2], 3, TABLES[1], 1), prompts[2]]
    planned = [true[0]._replace(token_ids=[0, 50, 51], start=30), true[1]._replace(token_ids=[0]), prompts[2]]
    unread = UnreadInputs([0, 1], torch.tensor([1, 2]), torch.tensor([10, 0]))
    torch.testing.assert_close(
        runner.compute(batch_of(planned, 16), unread), compute(plain, true), rtol=1e-4, atol=1e-5
    )
    decodes = RaggedBatch.of([QuerySpan(31, 1, TABLES[0]), QuerySpan(4, 1, TABLES[1])], 2, 16)
    unread = UnreadInputs([0], torch.tensor([4]), torch.tensor([8]))
    given = runner.compute(ForwardBatch(decodes, torch.tensor([0, 6])), unread)
    expected = compute(plain, [Chunk([4], 23, TABLES[0], 1), Chunk([6], 4, TABLES[1], 1)])
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="not interpreted")
def test_the_runner_takes_captured_steps_where_they_fit(target) -> None:
    """All logits, or those that are wanted; prompts run without."""
    pytest.importorskip("triton")
    plain = Runner(target, 9, 16, cache=CacheOptions("torch"))
    runner = Runner(target, 9, 16, cache=CacheOptions("torch"))
    replays: list[int] = []

    class Captured:
        """Replacement of `StepGraphs` for up to two rows; returns the model's own logits."""

        def run(self, batch, token_ids, shift):
            if len(token_ids) > 2:
                return None
            replays.append(len(token_ids))
            return runner.model.logits(runner._hidden(batch, token_ids, shift))[: len(token_ids)]

    runner._graphs = Captured()
    steps = [
        [Chunk([5, 80, 3], 0, TABLES[0], 1), Chunk([9], 0, TABLES[1], 1)],
        [Chunk([4, 7], 3, TABLES[0], 1)],
        [Chunk([1], 5, TABLES[0], 1), Chunk([2], 1, TABLES[1], 1)],
    ]
    for step in steps:
        torch.testing.assert_close(compute(runner, step), compute(plain, step))
    assert replays == [2, 2]
    sequences = RaggedBatch.of([QuerySpan(6, 1, TABLES[0]), QuerySpan(2, 1, TABLES[1])], 2, 16)
    decodes = ForwardBatch(sequences, torch.tensor([8, 6]))
    expected = compute(plain, [Chunk([8], 6, TABLES[0], 1), Chunk([6], 2, TABLES[1], 1)])
    torch.testing.assert_close(runner.compute(decodes), expected)
    assert replays == [2, 2, 2]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "_graphs", None)
        torch.testing.assert_close(runner.compute(decodes), expected)
