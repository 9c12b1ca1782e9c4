"""Requests that leave things open, on the device: their sampling, their length, and the end of repetition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from real_model import SMOLLM2, needs_smollm2
from updraft.embedded.pocket import pocket_small_gguf
from updraft.local_engine.engine import LocalEngine, LocalOptions, LocalRun
from updraft.protocol.errors import InvalidRequestError
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingDefaults, SamplingParams
from updraft.protocol.structured import Constraint
from updraft.text.repetition import INTERVAL, SPAN

ASK = [Message(role="user", content="hi")]
SAME = 40  # a token that is no end
FOREVER: dict[str, Any] = {"logit_bias": ((SAME, 100.0),)}


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine.load(pocket_small_gguf()) as engine:
        yield engine


def answered(engine: LocalEngine, constraint: Constraint | None = None, **options: Any) -> LocalRun:
    run = engine.start(ASK, SamplingParams(**options), constraint=constraint)
    for _ in run:
        pass
    return run


def ending(run: LocalRun) -> tuple[int, str | None, str | None]:
    return len(run.token_ids), run.finish_reason, run.stop_reason


def test_an_answer_says_how_it_was_sampled(engine: LocalEngine) -> None:
    assert answered(engine).sampling == SamplingDefaults(temperature=0.0)
    messages = answered(engine, temperature=0.5, top_k=0, repetition_penalty=1.2, seed=1)
    assert messages.sampling == SamplingDefaults(temperature=0.5, top_k=0, repetition_penalty=1.2)


def test_repetition_ends_an_answer(engine: LocalEngine) -> None:
    run = answered(engine, **FOREVER)
    assert ending(run) == (SPAN, "length", "repetition_detected")
    assert run.text == engine.token_bytes(SAME).decode() * SPAN


def test_requested_repetitions_are_not_ended(engine: LocalEngine) -> None:
    left = engine.context_length - answered(engine).prompt_tokens
    assert ending(answered(engine, **FOREVER, max_tokens=120)) == (120, "length", None)
    assert ending(answered(engine, **FOREVER, max_tokens=SPAN)) == (SPAN, "length", None)
    assert ending(answered(engine, **FOREVER, repetition_detection=False, max_tokens=300)) == (300, "length", None)
    held = answered(engine, **FOREVER, min_tokens=SPAN + 1)
    assert ending(held) == (SPAN + INTERVAL, "length", "repetition_detected")
    assert ending(answered(engine, **FOREVER, ignore_eos=True, max_tokens=300)) == (300, "length", None)
    assert ending(answered(engine, **FOREVER, repetition_detection=False)) == (left, "length", "default_max_tokens")
    held = answered(engine, Constraint("regex", "a{300}", "structured_outputs"), temperature=0.0)
    assert (held.text, held.stop_reason) == ("a" * 300, None)


def test_the_bound_of_an_answer_that_nobody_bounded() -> None:
    with LocalEngine.load(pocket_small_gguf(), LocalOptions(default_max_tokens=20)) as engine:
        assert ending(answered(engine, **FOREVER)) == (20, "length", "default_max_tokens")
        assert ending(answered(engine, **FOREVER, max_tokens=30)) == (30, "length", None)
    with pytest.raises(InvalidRequestError, match="default_max_tokens"):
        LocalEngine.load(pocket_small_gguf(), LocalOptions(default_max_tokens=0))


@needs_smollm2
def test_a_real_model_answers_in_sentences_and_comes_to_an_end() -> None:
    with LocalEngine.load(SMOLLM2) as engine:
        # No token of the greedy answer is close to another one: processors round differently.
        asked = [Message(role="user", content="Complete this sentence: The capital of France is")]
        greedy = engine.start(asked, SamplingParams(temperature=0.0))
        assert "Paris" in "".join(token.text for token in greedy)
        messages = [Message(role="user", content="What is the capital of France?")]
        for seed in range(4):
            run = engine.start(messages, SamplingParams(seed=seed))
            text = "".join(token.text for token in run)
            assert run.sampling == SamplingDefaults()
            assert len(run.token_ids) <= 1024 and run.finish_reason is not None
            words = text.split()
            assert len(words) >= 2 and sum(word.strip(".,'\"").isalpha() for word in words) > 0.7 * len(words), text
