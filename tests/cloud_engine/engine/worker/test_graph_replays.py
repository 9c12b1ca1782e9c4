"""Captures and replays of CUDA graphs over a trace of steps, with graphs that only count: no GPU is needed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.kv.sizing import cache_spec
from updraft.cloud_engine.engine.worker.cuda_graphs import MAX_DRAFT_ROWS, GraphSize, StepGraphs, smallest_size
from updraft.cloud_engine.engine.worker.model_runner import Runner, graph_limits
from updraft.kernels.attention.ops import TritonBackend


class CountedGraphs(StepGraphs):
    """Fill the metadata of the real graph sizes, but let the model's own attention compute the logits."""

    def __init__(self, engine: Engine) -> None:
        runner: Runner = engine._worker.runner
        limits = graph_limits(engine.config)
        assert limits is not None
        self._runner, self.captures, self.replayed = runner, 0, Counter[GraphSize]()
        self.without: list[tuple[int, int, int]] = []  # rows, sequences and longest span
        backend = TritonBackend(cache_spec(runner.model, engine._sizes.num_blocks, engine.config.block_size))
        super().__init__(runner.model, backend, limits, runner.tables, self._record)

    def _record(self, _compute):
        self.captures += 1
        return lambda: None

    def run(self, batch, token_ids, shift=None):
        size = smallest_size(self._sizes, len(token_ids), len(batch.rows) - 1)
        if super().run(batch, token_ids, shift) is None:
            return None
        assert size is not None
        self.replayed[size] += 1
        return self._runner.model.logits(self._runner._hidden(batch, token_ids, shift))[: len(token_ids)]


def trace(make_prompts, ask, answers=()):
    """96 requests: every tenth has a prediction of its whole answer, with errors; others sample or score tokens."""
    requests = []
    for at, request in enumerate(ask(make_prompts(96, seed=9), max_tokens=40, temperature=0.8, seed=1)):
        params = replace(request.params, max_tokens=30 + at % 60, ignore_eos=True)
        if at % 20 == 1:
            params = replace(params, presence_penalty=0.6)
        if at % 20 == 2:
            params = replace(params, logprobs=2)
        draft = [token if place % 9 else 3 for place, token in enumerate(answers[at])] if answers else []
        requests.append(replace(request, params=params, draft_ids=draft if at % 10 == 0 else []))
    return requests


def counted_run(
    engine: Engine, requests, graphs: CountedGraphs | None = None
) -> tuple[dict[str, list[int]], list[tuple[int, int, bool]]]:
    """Run the requests, which arrive in twos. Return the answers, and (rows, replays, whether prompts were read)."""
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    coming, steps = list(requests), []
    forward = engine._worker._forward

    def noted(slots, counts, num_drafts):
        before = graphs.replayed.total() if graphs else 0
        launched = forward(slots, counts, num_drafts)
        rows, reads = int(np.sum(counts + num_drafts)), bool(np.any(counts > 1))
        steps.append((rows, graphs.replayed.total() - before if graphs else 0, reads))
        return launched

    engine._worker._forward = noted
    while coming or engine.has_work:
        for request in coming[:2]:
            engine.add_request(request)
        coming = coming[2:]
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    return answers, steps


OPTIONS = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_waiting": 200, "block_size": 16}


@pytest.mark.parametrize("drafts", ["predictions", "draft"])
def test_every_plain_and_every_verification_step_replays_a_graph(
    drafts: str, both_depths, draft, make_engine, make_prompts, ask
) -> None:
    answers, _ = counted_run(make_engine(**OPTIONS), trace(make_prompts, ask))
    engine = make_engine(draft=draft if drafts == "draft" else None, draft_length="fixed", **OPTIONS)
    graphs = engine._worker.runner._graphs = CountedGraphs(engine)
    assert graphs.captures == len(graphs._sizes) <= 60
    requests = trace(make_prompts, ask, list(answers.values()))
    outputs, steps = counted_run(engine, requests, graphs)
    assert outputs == answers
    stats = engine.stats()
    assert stats.accepted_prediction_tokens > 0
    decoding = [(rows, replays) for rows, replays, reads in steps if not reads]
    assert [replays for rows, replays in decoding] == [int(rows <= MAX_DRAFT_ROWS) for rows, _ in decoding]
    verifying = sum(count for size, count in graphs.replayed.items() if size.rows > size.sequences)
    assert verifying > 10 and len(decoding) > 20
    assert graphs.captures == len(graphs._sizes)  # nothing is captured while requests are served
