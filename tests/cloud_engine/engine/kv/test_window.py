"""Models with a sliding window in every layer: blocks before the window are freed, and no answer changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_reference import random_tokens, reference_model
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.worker.served_model import DraftWeights, ServedModel
from updraft.cloud_engine.models.decoder import Decoder
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.protocol.errors import ContextLengthError

WINDOW = 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    reference = reference_model("Mistral", num_key_value_heads=2, sliding_window=WINDOW)
    folder = tmp_path_factory.mktemp("mistral")
    reference.save_pretrained(folder)
    return reference, load_model(folder)


@pytest.fixture(scope="module")
def expected(pair: tuple[Any, Decoder]) -> list[list[int]]:
    """Greedy answers of transformers to `prompts()`."""
    generate = pair[0].generate
    answers: list[list[int]] = []
    for prompt in prompts():
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        answers.append(
            generate(tokens, attention_mask=mask, max_new_tokens=60, do_sample=False, pad_token_id=0)[0].tolist()
        )
    return [answer[len(prompt) :] for prompt, answer in zip(prompts(), answers, strict=True)]


def prompts() -> list[list[int]]:
    return [random_tokens(length, length) for length in (5, 16, 90, 130)]


@pytest.fixture(scope="module")
def make_windowed(pair: tuple[Any, Decoder]) -> Callable[..., Engine]:
    def make(draft: Decoder | None = None, **config: Any) -> Engine:
        return Engine(ServedModel(pair[1]), EngineConfig(**config), draft=DraftWeights(draft) if draft else None)

    return make


@pytest.mark.usefixtures("both_depths")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"block_size": 4, "max_num_batched_tokens": 16},
        {"block_size": 64},
        {"num_gpu_blocks_override": 5, "max_num_batched_tokens": 16},  # 80 tokens, for requests of up to 190
        {"num_gpu_blocks_override": 24, "block_size": 4, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_answers_are_those_of_transformers(make_windowed, expected, ask, run, config) -> None:
    requests = ask(prompts(), max_tokens=60)
    engine = make_windowed(**config)
    assert [result.token_ids for result in run(engine, requests)] == expected
    assert [result.token_ids for result in run(engine, requests)] == expected, "with prefix hits"


@pytest.mark.usefixtures("both_depths")
def test_drafts_change_nothing(make_windowed, pair, expected, ask, run) -> None:
    for draft in (None, pair[1]):
        requests = ask(prompts(), max_tokens=60, drafts=[answer[:40] for answer in expected])
        engine = make_windowed(draft, num_gpu_blocks_override=8, max_num_batched_tokens=24)
        assert [result.token_ids for result in run(engine, requests)] == expected


@pytest.mark.usefixtures("both_depths")
def test_answers_that_share_a_prompt(make_windowed, ask, run) -> None:
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 40, "n": 3}
    one = run(make_windowed(enable_prefix_caching=False), ask(prompts(), **sampling))
    other = run(make_windowed(num_gpu_blocks_override=12, max_num_batched_tokens=16), ask(prompts(), **sampling))
    assert [result.token_ids for result in one] == [result.token_ids for result in other]


def test_no_more_is_held_than_the_window_needs(make_windowed, ask) -> None:
    engine = make_windowed(block_size=4, max_num_batched_tokens=16)
    (request,) = ask([random_tokens(130)], max_tokens=60)
    engine.add_request(request)
    while engine.has_work:
        engine.step()
        assert engine.stats().kv_blocks_used <= (WINDOW - 1 + 16) // 4 + 2
        assert 0 <= engine.stats().kv_slots_wasted < 16


def test_a_prefix_is_found_by_the_blocks_in_reach_of_its_end(make_windowed, expected, ask, run) -> None:
    """The first blocks of a prompt of 130 tokens are long gone from a pool of 80, and not needed."""
    engine = make_windowed(num_gpu_blocks_override=5, max_num_batched_tokens=16)
    run(engine, ask(prompts()[3:], max_tokens=1))
    (again,) = run(engine, ask(prompts()[3:], max_tokens=60))
    assert again.stats.cached_tokens == 128
    assert again.token_ids == expected[3]


def test_oversized_requests_are_refused(make_windowed, ask) -> None:
    with pytest.raises(ContextLengthError, match="context is 48 tokens"):
        make_windowed(num_gpu_blocks_override=3, max_num_batched_tokens=32).add_request(ask([random_tokens(90)])[0])


def test_a_draft_model_without_a_window_keeps_all_blocks(make_windowed, draft, ask) -> None:
    engine = make_windowed(draft)
    engine.add_request(ask([random_tokens(130)])[0])
    engine.step()
    engine.step()
    assert engine.stats().kv_blocks_used == 9


def test_one_layer_that_sees_everything_keeps_all_blocks(tmp_path, ask) -> None:
    reference = reference_model(
        "Gemma3",
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=18,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    reference.save_pretrained(tmp_path)
    engine = Engine(ServedModel(load_model(tmp_path)), EngineConfig())
    engine.add_request(ask([random_tokens(130)])[0])
    engine.step()
    assert engine.stats().kv_blocks_used == 9
