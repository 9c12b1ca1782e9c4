"""The way of an engine's outputs into an answer, and the engine's news of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.cloud_engine.engine.types.outputs import RequestStats, TokenLogprob, TokenOutput
from updraft.cloud_engine.engine.types.prediction import PredictionCursor
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.node.answers.answer_stream import Piece, TokenExchange, pieces
from updraft.cloud_engine.node.answers.latency import Latencies
from updraft.protocol.responses import Usage
from updraft.protocol.sampling import SamplingParams
from updraft.text.templates.reasoning import ReasoningStyle
from updraft.text.tool_stream import AnswerParser, AnswerSyntax


class Letters:
    """Token 1 is an a, and so on."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([96 + token_id])


class Source:
    """Two answers, token by token: abcd.. and bcde.."""

    def __init__(self) -> None:
        self.stopped: list[tuple[str, int]] = []
        self.sent = [0, 0]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput]:
        for token in range(1, 9):
            for index in (0, 1):
                if (request.request_id, index) not in self.stopped:
                    self.sent[index] += 1
                    yield TokenOutput(request.request_id, [token + index], index=index)

    def stop_answer(self, request_id: str, index: int) -> None:
        self.stopped.append((request_id, index))


def test_the_engine_hears_of_an_answer_that_a_stop_string_ends() -> None:
    source: Any = Source()
    request = GenerationRequest("r", [1], SamplingParams(stop=("c",)), n=2)

    async def texts() -> list[str]:
        events = ["", ""]
        async for piece in pieces(source, Letters(), request):  # type: ignore[arg-type]
            events[piece.index] += piece.text
        return events

    assert asyncio.run(texts()) == ["ab", "b"]
    assert source.stopped == [("r", 1)], "and not of the last one, with which all is over"
    assert source.sent == [3, 2]


@pytest.mark.parametrize("given", [b"", b"is it?</", b"is it?</think> I"])
def test_stop_strings_act_on_the_answer_alone(given: bytes) -> None:
    """Also if another node has written a part of the reasoning."""
    text = b"is it?</think> It is so."[len(given) :]
    source: Any = Once(*([token] for token in text))
    request = GenerationRequest("r", [1], SamplingParams(stop=("is",)))
    syntax = AnswerSyntax(None, ReasoningStyle(True))

    async def read_all() -> list[Piece]:
        exchange = TokenExchange(given=list(given))
        return [piece async for piece in pieces(source, WithoutSpecial(), request, syntax, exchange)]  # type: ignore[arg-type]

    *_, last = stream = asyncio.run(read_all())
    written = "".join(piece.text for piece in stream)
    assert "is it?</think> It ".endswith(written) and written.endswith("t ")
    assert (last.finish_reason, last.stop_reason) == ("stop", "is")


def test_marks_of_reasoning_may_be_special_tokens() -> None:
    class Channels(Bytes):
        def special_id(self, text: str) -> int | None:
            return {"<|channel>": 300, "<channel|>": 301}.get(text)

    source: Any = Once([300, *b"thought\nis"], [301], list(b"It is so."))
    request = GenerationRequest("r", [1], SamplingParams(stop=("is",)))
    syntax = AnswerSyntax(None, ReasoningStyle(False, "<|channel>thought", "<channel|>"))

    async def read_all() -> str:
        return "".join([piece.text async for piece in pieces(source, Channels(), request, syntax)])  # type: ignore[arg-type]

    message, _ = AnswerParser(None, syntax.reasoning).whole(asyncio.run(read_all()), "stop")
    assert (message.reasoning_content, message.content) == ("is", "It ")


class Once:
    """One answer, in steps of as many tokens as said."""

    def __init__(self, *steps: list[int]) -> None:
        self._steps = steps

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput]:
        for step in self._steps:
            yield TokenOutput(request.request_id, step, tuple(TokenLogprob(-1.0) for _ in step))

    def stop_answer(self, request_id: str, index: int) -> None:
        raise AssertionError("there is no other answer")


class Bytes:
    """A token is a byte; those above 255 are no text."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


class WithoutSpecial(Bytes):
    def special_id(self, text: str) -> None:
        return None


def read(source: Any, tokenizer: Any, request: GenerationRequest) -> list[Piece]:
    async def all_of_it() -> list[Piece]:
        return [piece async for piece in pieces(source, tokenizer, request)]

    return asyncio.run(all_of_it())


@given(st.binary(min_size=1, max_size=40), st.data())
def test_another_node_continues_after_the_reported_tokens(text: bytes, data: st.DataObject) -> None:
    """A stream breaks off anywhere: within a character, in invalid bytes, or within a stop string."""
    tokens = list(text)
    request = GenerationRequest("r", [0], SamplingParams(stop=("ab", "\xe9x")))

    def run(tokens: list[int], given: list[int]) -> list[Piece]:
        async def all_of_it() -> list[Piece]:
            source: Any = Once(*([token] for token in tokens))
            exchange = TokenExchange(reported=True, given=given)
            return [piece async for piece in pieces(source, Bytes(), request, None, exchange)]  # type: ignore[arg-type]

        return asyncio.run(all_of_it())

    whole = run(tokens, [])
    cut = data.draw(st.integers(0, len(whole)))
    if any(piece.finish_reason for piece in whole[:cut]):
        return
    begun = [token for piece in whole[:cut] for token in piece.token_ids]
    rest = run(tokens[len(begun) :], begun)
    assert "".join(piece.text for piece in [*whole[:cut], *rest]) == "".join(piece.text for piece in whole)


def test_a_stop_string_does_not_change_how_a_prediction_is_counted() -> None:
    """The engine finds back into a prediction behind two misses; so does who counts in its place."""
    prediction = list(range(1, 21))
    steps = [[1], [99], [98], *([token] for token in range(4, 17))]
    cursor = PredictionCursor(prediction)
    known = [0]
    for step in steps:
        known += step
        cursor.advance(known, len(step), 0)
    request = GenerationRequest("r", [0], SamplingParams(stop=("p",)), prediction)  # p is the 16th letter
    *_, last = read(Once(*steps), Letters(), request)
    assert last.usage is not None and last.finish_reason == "stop"
    details = last.usage.completion_tokens_details
    assert (last.usage.completion_tokens, cursor.num_accepted) == (16, 11)
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (11, 9)


@pytest.mark.parametrize("cut", [1, 7], ids=["token by token", "in one step"])
@pytest.mark.parametrize(("least", "text"), [(0, "ab"), (2, "ab"), (3, "abcab"), (5, "abcab"), (6, "abcabca")])
def test_within_its_least_tokens_no_stop_string_ends_an_answer(least: int, text: str, cut: int) -> None:
    tokens = [1, 2, 3, 1, 2, 3, 1]
    request = GenerationRequest("r", [0], SamplingParams(stop=("c",), min_tokens=least))
    steps = [tokens[start : start + cut] for start in range(0, len(tokens), cut)]
    events = read(Once(*steps), Letters(), request)
    assert "".join(piece.text for piece in events) == text
    stopped = [piece.usage.completion_tokens for piece in events if piece.finish_reason == "stop" and piece.usage]
    assert stopped == ([len(text) + 1] if len(text) < len(tokens) else [])


@pytest.mark.parametrize("cut", [1, 7], ids=["token by token", "in one step"])
@pytest.mark.parametrize(("least", "text"), [(1, ""), (2, ""), (3, "abc"), (5, "abc"), (6, "abcabce")])
def test_a_stop_string_may_begin_before_the_least_tokens_but_ends_after_them(least: int, text: str, cut: int) -> None:
    """As in vLLM's `update` of its detokenizer."""
    tokens = [1, 2, 3, 1, 2, 3, 5]
    request = GenerationRequest("r", [0], SamplingParams(stop=("abc", "abcd"), min_tokens=least))
    steps = [tokens[start : start + cut] for start in range(0, len(tokens), cut)]
    assert "".join(piece.text for piece in read(Once(*steps), Letters(), request)) == text


def test_an_offset_is_where_the_text_of_a_token_begins() -> None:
    tokens = [*"a🙂".encode(), 300, *"é!".encode()]
    request = GenerationRequest("r", [0], SamplingParams(logprobs=0, stop=("!",)))
    events = [
        (score.token_id, score.offset) for piece in read(Once(tokens), Bytes(), request) for score in piece.scores
    ]
    assert events == list(zip(tokens[:-1], [0, 1, 1, 1, 1, 2, 2, 2], strict=True))


@pytest.mark.parametrize(("steps", "paced"), [([[97], [97], [97, 33]], 1), ([[97, 97, 97, 33]], 0)])
def test_tokens_in_one_event_have_no_pace(steps: list[list[int]], paced: int) -> None:
    latencies, request = Latencies(), GenerationRequest("r", [0], SamplingParams(stop=("!",)))
    source: Any = Once(*steps)

    async def watch() -> None:
        async for _ in latencies.watch(pieces(source, Bytes(), request), time.perf_counter()):  # type: ignore[arg-type]
            pass

    asyncio.run(watch())
    assert (sum(latencies.ttft.counts), sum(latencies.e2e.counts), sum(latencies.tpot.counts)) == (1, 1, paced)


def test_answers_that_come_whole_have_no_pace() -> None:
    """One after the other, each at once."""
    latencies = Latencies()

    async def whole() -> AsyncGenerator[Piece]:
        for index in range(3):
            yield Piece("abc", finish_reason="stop", usage=Usage.of(1, 3), index=index)

    async def watch() -> None:
        async for _ in latencies.watch(whole(), time.perf_counter()):
            pass

    asyncio.run(watch())
    assert (latencies.finished["stop"], sum(latencies.tpot.counts)) == (3, 0)


class Silent(Once):
    """No log-probabilities, and an end."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput]:
        for step in self._steps:
            yield TokenOutput(request.request_id, step)
        stats = RequestStats(1, 0, sum(map(len, self._steps)), 0, 0, 0, 0)
        yield TokenOutput(request.request_id, [], finish_reason="length", stats=stats)


@given(st.lists(st.lists(st.sampled_from([*"aé🙂".encode(), 0xFF, 300]), max_size=6), max_size=6))
def test_text_that_nothing_can_cut_short_is_read_step_by_step_all_the_same(steps: list[list[int]]) -> None:
    watched = GenerationRequest("r", [0], SamplingParams(stop=("never",)))
    free = GenerationRequest("r", [0], SamplingParams())
    events, expected = (read(Silent(*steps), Bytes(), request) for request in (free, watched))
    assert events == expected
    text = bytes(token for step in steps for token in step if token < 256).decode("utf-8", "replace")
    assert "".join(piece.text for piece in events) == text
    assert events[-1].num_tokens == sum(map(len, steps))
