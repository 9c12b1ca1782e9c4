"""Requests that leave things open, at a node's engine: sampling, length and repetition, however the tokens come."""

from __future__ import annotations

from typing import Any

import pytest
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.types.outputs import TokenOutput
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.worker.served_model import ServedModel
from updraft.protocol.errors import ConfigurationError
from updraft.protocol.sampling import PLAIN_SAMPLING, SamplingDefaults, SamplingParams
from updraft.text.repetition import INTERVAL, SPAN

PROMPT = [5, 6, 7, 8, 5, 6, 7]
SAME = 40
FOREVER: dict[str, Any] = {"temperature": 0.0, "logit_bias": ((SAME, 100.0),)}


@pytest.fixture(scope="module")
def model(make_llama: Any) -> Any:
    return make_llama(0, context_length=700)


def engine_of(model: Any, sampling: SamplingDefaults = PLAIN_SAMPLING, **config: Any) -> Engine:
    return Engine(ServedModel(model, sampling=sampling), EngineConfig(**config))


def answered(engine: Engine, *requests: GenerationRequest) -> list[tuple[list[int], TokenOutput]]:
    """The tokens and the last output of each request."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    last: dict[str, TokenOutput] = {}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            last[output.request_id] = output
    assert engine.stats().kv_blocks_used == 0
    return [(tokens[name], last[name]) for name in tokens]


def asked(name: str = "r", draft: list[int] | None = None, **options: Any) -> GenerationRequest:
    return GenerationRequest(name, PROMPT, SamplingParams(**{**FOREVER, **options}), draft or [])


def ending(engine: Engine, request: GenerationRequest) -> tuple[int, str | None, str | None]:
    [(tokens, last)] = answered(engine, request)
    assert last.stats is not None and last.stats.completion_tokens == len(tokens)
    return len(tokens), last.finish_reason, last.stop_reason


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {}),
        ({"block_size": 7}, {}),
        ({}, {"logprobs": 1}),
        ({"ngram": True, "draft_length": "fixed"}, {}),
        ({}, {"draft": [SAME] * 500}),
        ({}, {"draft": [SAME] * 300 + [3] * 10}),
        ({}, {"draft": [SAME] * 100 + [3] * 400}),
        ({}, {"frequency_penalty": 0.01}),
    ],
    ids=[
        "plain",
        "odd blocks",
        "logprobs",
        "ngram",
        "prediction",
        "prediction that ends",
        "wrong",
        "edits that follow",
    ],
)
def test_repetition_ends_an_answer_at_one_length_in_every_mode(model, config, options) -> None:
    assert ending(engine_of(model, **config), asked(**options)) == (SPAN, "length", "repetition_detected")


def test_neither_the_prompt_nor_what_must_come_counts(model) -> None:
    prompt = GenerationRequest("r", [SAME] * 300, SamplingParams(**FOREVER))
    assert ending(engine_of(model), prompt) == (SPAN, "length", "repetition_detected")
    assert ending(engine_of(model), asked(min_tokens=SPAN + 1)) == (SPAN + INTERVAL, "length", "repetition_detected")


def test_requested_repetitions_are_not_ended(model) -> None:
    left = 700 - len(PROMPT)
    assert ending(engine_of(model), asked(max_tokens=200)) == (200, "length", None)
    assert ending(engine_of(model), asked(max_tokens=SPAN)) == (SPAN, "length", None)
    assert ending(engine_of(model), asked(repetition_detection=False, max_tokens=600)) == (600, "length", None)
    assert ending(engine_of(model), asked(ignore_eos=True, max_tokens=600)) == (600, "length", None)
    assert ending(engine_of(model), asked(repetition_detection=False)) == (left, "length", "default_max_tokens")


def test_many_answers_end_each_in_its_own_time(model) -> None:
    """Beside others that go on, one of them ended by its limit in the same step as one by repetition."""
    requests = [
        asked("loop"),
        asked("free", logit_bias=(), max_tokens=400, temperature=1.0, seed=1),
        asked("limit", max_tokens=SPAN),
        asked("late", draft=[SAME] * 20),
        asked("on", repetition_detection=False, max_tokens=SPAN + 2 * INTERVAL),
    ]
    answers = {
        name: (len(tokens), last.stop_reason)
        for name, (tokens, last) in zip(
            ("loop", "free", "limit", "late", "on"), answered(engine_of(model), *requests), strict=True
        )
    }
    assert answers == {
        "loop": (SPAN, "repetition_detected"),
        "free": (400, None),
        "limit": (SPAN, None),
        "late": (SPAN, "repetition_detected"),
        "on": (SPAN + 2 * INTERVAL, None),
    }


def test_the_bound_of_an_answer_that_nobody_bounded(model) -> None:
    engine = engine_of(model, default_max_tokens=20)
    assert ending(engine, asked(logit_bias=())) == (20, "length", "default_max_tokens")
    assert ending(engine, asked(logit_bias=(), max_tokens=30)) == (30, "length", None)
    with pytest.raises(ConfigurationError, match="default_max_tokens"):
        EngineConfig(default_max_tokens=0)


def test_the_models_own_sampling_holds_where_a_request_says_nothing(model) -> None:
    def tokens(engine: Engine, **options: Any) -> list[int]:
        request = GenerationRequest("r", PROMPT, SamplingParams(max_tokens=12, seed=3, **options))
        return answered(engine, request)[0][0]

    own = SamplingDefaults(temperature=1.4, top_k=3, top_p=1.0, min_p=0.0)
    plain, narrow = engine_of(model), engine_of(model, own)
    assert tokens(narrow) == tokens(plain, temperature=1.4, top_k=3)
    assert tokens(narrow, top_k=0, temperature=1.0) == tokens(plain)
    assert tokens(narrow) != tokens(plain)
    assert tokens(engine_of(model, SamplingDefaults(temperature=0.0))) == tokens(plain, temperature=0.0)
