"""Real models, real prompts: 200 tasks greedy, with every drafter, alone and in company, all as without drafts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.request import GenerationRequest
from updraft.embedded import pocket
from updraft.embedded.tasks import make_tasks
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams

LENGTH, PROMPTS = 20, 200


def start(*, draft: bool = False, **config: object) -> Engine:
    options = EngineConfig(
        prefix_caching=False, max_waiting=PROMPTS, draft_length="fixed", num_draft_tokens=5, **config
    )
    folder = pocket.pocket_small_folder() if draft else None
    return Engine.from_folder(pocket.pocket_large_folder(), draft=folder, config=options)


def answers(engine: Engine, prompts: list[list[int]], predictions: list[list[int]] | None = None) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH)
    for number, prompt in enumerate(prompts):
        predicted = predictions[number] if predictions else []
        engine.add_request(GenerationRequest(str(number), prompt, params, predicted))
    found: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            found[int(output.request_id)] += output.token_ids
    return found


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = start().tokenizer
    tasks = make_tasks("test", PROMPTS, seed=3)
    return [tokenizer.encode_chat([Message(role="user", content=task.prompt)]) for task in tasks]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[list[int]]:
    return answers(start(max_batch_size=16), prompts)


@pytest.fixture(scope="module")
def small_answers(prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    """What the device would send up: often right, often not."""
    config = EngineConfig(max_batch_size=32, max_waiting=PROMPTS)
    yield answers(Engine.from_folder(pocket.pocket_small_folder(), config=config), prompts)


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_the_draft_model_changes_no_answer(batch_size: int, prompts, plain) -> None:
    engine = start(draft=True, max_batch_size=batch_size)
    assert answers(engine, prompts) == plain
    assert 0.5 < engine.stats().acceptance_rate < 0.99


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_ngrams_change_no_answer(batch_size: int, prompts, plain) -> None:
    engine = start(ngram=True, max_batch_size=batch_size)
    assert answers(engine, prompts) == plain
    stats = engine.stats()
    assert 0 < stats.ngram_accepted < stats.ngram_proposed


@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_the_small_models_answer_as_prediction_changes_no_answer(
    batch_size: int, prompts, plain, small_answers
) -> None:
    engine = start(draft=batch_size == 4, max_batch_size=batch_size)
    assert answers(engine, prompts, small_answers) == plain
    stats = engine.stats()
    assert stats.accepted_prediction_tokens > 0
    assert stats.rejected_prediction_tokens > 0
