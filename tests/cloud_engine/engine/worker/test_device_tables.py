"""Triton's attention reads block tables that only get changes: the same answers, at both depths."""

from __future__ import annotations

import os

import pytest
import torch
from updraft.cloud_engine.engine.kv.sizing import cache_spec
from updraft.kernels.attention.ops import TritonBackend

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported


@pytest.mark.skipif(torch.cuda.is_available(), reason="not interpreted")
@pytest.mark.parametrize("has_predictions", [False, True])
def test_the_tables_on_the_device_are_those_of_the_plans(
    has_predictions: bool, both_depths, target, make_engine, make_prompts, ask, run
) -> None:
    """With preemptions, slots that others used before, and blocks that rejected drafts gave back."""
    pytest.importorskip("triton")
    prompts = [prompt[:20] for prompt in make_prompts(7, seed=6)]
    expected = [result.token_ids for result in run(make_engine(), ask(prompts, max_tokens=14))]
    drafts = [[token if at % 5 else 3 for at, token in enumerate(answer)] for answer in expected]
    options = {"num_gpu_blocks_override": 5, "max_num_seqs": 3, "block_size": 16, "max_model_len": 64}
    engine = make_engine(draft_length="fixed", **options)
    runner, tables = engine._worker.runner, engine._worker.slots.tables
    runner._backend, runner._compiled = TritonBackend(cache_spec(target, 5, 16)), None
    answers: dict[str, list[int]] = {}
    for request in ask(prompts, max_tokens=14, drafts=drafts if has_predictions else ()):
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
        assert tables.on(torch.device("cpu")).tolist() == tables.flat.tolist()
    assert list(answers.values()) == expected and engine.stats().preemptions > 0
    assert not has_predictions or engine.stats().accepted_prediction_tokens > 0
