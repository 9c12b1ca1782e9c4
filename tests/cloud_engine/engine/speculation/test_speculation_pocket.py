"""Real models, real prompts: 200 tasks greedy, with every drafter, alone and in company, all as without drafts.

In batch-invariant mode to the last bit of their log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.embedded import pocket
from updraft.embedded.tasks import make_tasks
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams

LENGTH, PROMPTS = 20, 200
EVERY_BIT = 80  # of the prompts, where log-probabilities are compared
Asked = list[list[int]]


def start(*, draft: bool = False, enable_prefix_caching: bool = False, **config: Any) -> Engine:
    options = EngineConfig(
        enable_prefix_caching=enable_prefix_caching,
        max_waiting=PROMPTS,
        draft_length="fixed",
        num_speculative_tokens=5,
        **config,
    )
    folder = pocket.pocket_small_folder() if draft else None
    return Engine.from_folder(pocket.pocket_large_folder(), draft=folder, config=options)


def answers(
    engine: Engine, prompts: Asked, predictions: Asked | None = None, logprobs: int | None = None
) -> list[list[Any]]:
    """The tokens of each; with `logprobs` each token with its score."""
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, logprobs=logprobs)
    for number, prompt in enumerate(prompts):
        predicted = predictions[number] if predictions else []
        engine.add_request(GenerationRequest(str(number), prompt, params, predicted))
    texts: list[list[Any]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            tokens = output.token_ids
            texts[int(output.request_id)] += tokens if logprobs is None else zip(tokens, output.logprobs, strict=True)
    return texts


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = start().tokenizer
    tasks = make_tasks("test", PROMPTS, seed=3)
    return [tokenizer.encode_chat([Message(role="user", content=task.prompt)]) for task in tasks]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[list[int]]:
    return answers(start(max_num_seqs=16), prompts)


@pytest.fixture(scope="module")
def small_answers(prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    """The drafts that the device would send: often right, often not."""
    config = EngineConfig(max_num_seqs=32, max_waiting=PROMPTS)
    yield answers(Engine.from_folder(pocket.pocket_small_folder(), config=config), prompts)


@pytest.mark.parametrize("batch_size", [1, 16])
def test_the_draft_model_changes_no_answer(batch_size: int, prompts, plain) -> None:
    engine = start(draft=True, max_num_seqs=batch_size)
    assert answers(engine, prompts) == plain
    stats = engine.stats()
    assert 0.5 < stats.draft_accepted / stats.draft_proposed < 0.99


@pytest.mark.parametrize("batch_size", [1, 16])
def test_ngrams_change_no_answer(batch_size: int, prompts, plain) -> None:
    engine = start(ngram=True, max_num_seqs=batch_size)
    assert answers(engine, prompts) == plain
    stats = engine.stats()
    assert 0 < stats.ngram_accepted < stats.ngram_proposed


@pytest.mark.parametrize("batch_size", [4, 16])
def test_the_small_models_answer_as_prediction_changes_no_answer(
    batch_size: int, prompts, plain, small_answers
) -> None:
    engine = start(draft=batch_size == 4, max_num_seqs=batch_size)
    assert answers(engine, prompts, small_answers) == plain
    stats = engine.stats()
    assert stats.accepted_prediction_tokens > 0
    assert stats.rejected_prediction_tokens > 0


@pytest.fixture(scope="module")
def alone(prompts: Asked) -> list[list[Any]]:
    """With log-probabilities."""
    return answers(start(max_num_seqs=1, batch_invariant=True), prompts[:EVERY_BIT], logprobs=1)


@pytest.mark.parametrize(("drafter", "batch_size"), [("draft", 4), ("ngram", 16)])
def test_in_batch_invariant_mode_drafts_change_no_bit(drafter: str, batch_size: int, prompts, alone) -> None:
    engine = start(max_num_seqs=batch_size, batch_invariant=True, **{drafter: True})
    assert answers(engine, prompts[:EVERY_BIT], logprobs=1) == alone
    stats = engine.stats()
    assert 0 < getattr(stats, f"{drafter}_accepted") < getattr(stats, f"{drafter}_proposed")


def test_in_batch_invariant_mode_chunks_prefix_hits_and_predictions_change_no_bit(
    prompts, alone, small_answers
) -> None:
    prompts = prompts[:EVERY_BIT]
    engine = start(
        batch_invariant=True, max_num_batched_tokens=32, enable_prefix_caching=True, num_gpu_blocks_override=2048
    )
    assert answers(engine, prompts, logprobs=1) == alone
    hits, steps = engine.stats().prefix_hit_tokens, engine.stats().speculative_steps
    assert answers(engine, prompts, small_answers, logprobs=1) == alone
    stats = engine.stats()
    assert stats.prefix_hit_tokens - hits > sum(map(len, prompts)) / 2
    assert (steps, stats.speculative_steps > 0) == (0, True)
    assert min(stats.accepted_prediction_tokens, stats.rejected_prediction_tokens) > 0
