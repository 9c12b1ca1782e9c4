"""Log-probabilities of prompt tokens against transformers, over chunk borders and cached prefixes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoder_reference import expected_logprobs, random_tokens, reference_model
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.worker.served_model import DraftWeights, ServedModel
from updraft.cloud_engine.models.loading.loader import load_model

PROMPTS = [random_tokens(length, length) for length in (1, 2, 16, 17, 50, 90)]


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model("Mistral", num_key_value_heads=2, sliding_window=20)


@pytest.fixture(scope="module")
def make_scoring(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    folder = tmp_path_factory.mktemp("mistral")
    reference.save_pretrained(folder)
    model = load_model(folder)

    def make(*, with_draft: bool = False, **config: Any) -> Engine:
        draft = DraftWeights(model) if with_draft else None
        return Engine(ServedModel(model), EngineConfig(**config), draft=draft)

    return make


def assert_scores(reference: Any, prompt: list[int], scores: list[Any], num_top: int) -> None:
    expected = expected_logprobs(reference, prompt)[:-1]
    assert len(scores) == len(prompt) - 1
    for row, token, score in zip(expected, prompt[1:], scores, strict=True):
        assert score.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert score.rank == int((row > row[token]).sum()) + 1
        assert [value for _, value in score.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)


@pytest.mark.usefixtures("both_depths")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_batched_tokens": 16, "block_size": 4},
        {"max_num_batched_tokens": 17, "num_gpu_blocks_override": 8, "block_size": 64},
        {"max_num_batched_tokens": 24, "with_draft": True},
        {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 6},
    ],
    ids=str,
)
def test_scores_are_those_of_transformers(reference, make_scoring, ask, run, config) -> None:
    engine = make_scoring(**config)
    plain = [result.token_ids for result in run(make_scoring(), ask(PROMPTS))]
    for _ in range(2):  # the second time the prefixes are in the cache, and not used
        results = run(engine, ask(PROMPTS, prompt_logprobs=3))
        for prompt, result in zip(PROMPTS, results, strict=True):
            assert_scores(reference, prompt, result.prompt_logprobs, 3)
            assert result.stats.cached_tokens == 0
        assert [result.token_ids for result in results] == plain
    if "num_gpu_blocks_override" not in config:
        assert run(engine, ask(PROMPTS))[5].stats.cached_tokens >= 64, "others may use them"


@pytest.mark.usefixtures("both_depths")
def test_a_preempted_request_scores_every_token_once(reference, make_scoring, ask) -> None:
    engine = make_scoring(
        max_num_batched_tokens=16, block_size=4, num_gpu_blocks_override=12, scheduling_policy="priority"
    )
    request = replace(ask([PROMPTS[5]], prompt_logprobs=0)[0], priority=5)
    urgent = replace(ask([PROMPTS[4]], max_tokens=20)[0], request_id="urgent")
    scores: list[Any] = []
    engine.add_request(request)
    for _ in range(3):
        engine.step()
    engine.add_request(urgent)
    while engine.has_work:
        for output in engine.step():
            scores += output.prompt_logprobs
    assert engine.stats().preemptions == 1
    assert_scores(reference, PROMPTS[5], scores, 0)


def test_answers_of_one_request_score_its_prompt_once(reference, make_scoring, ask, run) -> None:
    results = run(make_scoring(), ask([PROMPTS[4]], n=3, prompt_logprobs=1, temperature=1.0, seed=1, logprobs=0))
    assert_scores(reference, PROMPTS[4], results[0].prompt_logprobs, 1)
    assert results[1].prompt_logprobs == results[2].prompt_logprobs == []
    assert all(len(result.logprobs) == 24 for result in results)


def test_memory_is_bounded_by_the_chunk(make_scoring, ask, monkeypatch) -> None:
    engine = make_scoring(max_num_batched_tokens=16)
    most = 0
    compute = engine._worker.runner.compute

    def watched(batch: Any, unread: Any = None) -> torch.Tensor:
        nonlocal most
        logits = compute(batch, unread)
        most = max(most, len(logits))
        return logits

    monkeypatch.setattr(engine._worker.runner, "compute", watched)
    engine.add_request(ask([PROMPTS[5]], prompt_logprobs=20)[0])
    while engine.has_work:
        engine.step()
    assert most == 16
