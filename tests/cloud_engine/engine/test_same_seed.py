"""Same seed, same tokens: whatever shares the batch, however it is chunked, cached, preempted or drafted.

In float32: logits of one token differ in their last bits between batch shapes, and a seed says which token is drawn
from them, so equality is exact but for draws within these last bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.protocol.sampling import SamplingParams

PROBE = GenerationRequest(
    "probe", [index * 7 % 97 for index in range(45)], SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=30)
)


@pytest.fixture(scope="module")
def alone(make_engine: Any, run: Any) -> list[int]:
    return run(make_engine(max_num_seqs=1), [PROBE])[0].token_ids


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    block_size=st.sampled_from([4, 16, 64]),
    tokens_in_pool=st.sampled_from([192, 384, 4096]),
    max_num_batched_tokens=st.sampled_from([16, 23, 512]),
    enable_prefix_caching=st.booleans(),
    with_draft=st.booleans(),
    company=st.lists(st.sampled_from(["greedy", "sampled", "same prompt", "three", "scored"]), max_size=6),
    before=st.integers(0, 3),
)
def test_a_seed_decides_the_tokens(
    make_engine: Any,
    make_prompts: Any,
    draft: Any,
    alone: list[int],
    block_size: int,
    tokens_in_pool: int,
    max_num_batched_tokens: int,
    enable_prefix_caching: bool,
    with_draft: bool,
    company: list[str],
    before: int,
) -> None:
    engine = make_engine(
        draft=draft if with_draft else None,
        block_size=block_size,
        num_gpu_blocks_override=tokens_in_pool // block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
    others = [companion(kind, index, make_prompts(6)[index]) for index, kind in enumerate(company)]
    for attempt in range(2):  # the second time there is a cached prefix
        for request in others[:before]:
            engine.add_request(replace(request, request_id=f"{attempt} {request.request_id}"))
            engine.step()
        engine.add_request(PROBE)
        for request in others[before:]:
            engine.add_request(replace(request, request_id=f"{attempt} {request.request_id}"))
        tokens: list[int] = []
        while engine.has_work:
            for output in engine.step():
                tokens += output.token_ids if output.request_id == "probe" else []
        assert tokens == alone
    assert engine.stats().kv_blocks_used == 0


def companion(kind: str, index: int, prompt: list[int]) -> GenerationRequest:
    sampled = SamplingParams(temperature=1.3, seed=index, max_tokens=12)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    requests = {
        "greedy": GenerationRequest("greedy", prompt, greedy),
        "sampled": GenerationRequest("sampled", prompt, sampled),
        "same prompt": replace(PROBE, request_id="same", params=sampled),
        "three": GenerationRequest("three", prompt, sampled, n=3),
        "scored": GenerationRequest("scored", prompt, replace(sampled, prompt_logprobs=2)),
    }
    return replace(requests[kind], request_id=f"{index} {kind}")
