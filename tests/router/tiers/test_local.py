"""The local tier over an engine: its record of an answer, cancellation, failures, and many requests at once."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
from router_fakes import FakeSignals, FakeToken
from updraft.protocol.errors import ContextLengthError, EngineError
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingDefaults, SamplingParams
from updraft.router.tiers.local import EngineLocalTier
from updraft.text.chat import ChatTemplate

MESSAGES = [Message(role="user", content="hi")]
PARAMS = SamplingParams()


class SlowRun:
    """Like `LocalRun`: nothing more comes after `close`."""

    prompt_tokens = 3
    cached_tokens = 2
    prompt_hidden = np.zeros(4, dtype=np.float32)
    prompt_logprobs = np.zeros(2, dtype=np.float32)
    prompt_scores = None
    reasoning = None

    def __init__(self, engine: SlowEngine) -> None:
        self._engine = engine
        self._closed = False
        self._index = 0
        self.signals: list[Any] = []
        self.text = ""
        self.finish_reason: Any = None
        self.stop_reason: Any = None
        self.sampling = SamplingDefaults()
        self.answer_hidden: Any = None

    def __aiter__(self) -> SlowRun:
        return self

    async def __anext__(self) -> FakeToken:
        await asyncio.sleep(self._engine.delay_s)
        if self._closed:
            raise StopAsyncIteration
        index, self._index = self._index, self._index + 1
        if index == self._engine.fails_at:
            raise EngineError("decode failed")
        if index == self._engine.length:
            self.signals.append(FakeSignals())
            self.text += "held back"
            self.finish_reason = "stop"
            self.answer_hidden = np.ones(4, dtype=np.float32)
            raise StopAsyncIteration
        token = FakeToken(index, f"t{index} ", FakeSignals())
        self.signals.append(token.signals)
        self.text += token.text
        return token

    def close(self) -> None:
        self._engine.open -= not self._closed
        self._closed = True


class SlowEngine:
    model_id = "slow"
    context_length = 512
    tool_format = None
    reasoning = None
    chat_template = ChatTemplate("{{ messages }}")

    def __init__(self) -> None:
        self.length, self.delay_s, self.fails_at = 5, 0.0, -1
        self.open = self.most_open = 0
        self.closed = False
        self.lock = threading.Lock()

    def start(self, messages: Any, params: Any, **options: Any) -> SlowRun:
        if messages[0].content == "long":
            raise ContextLengthError("too long")
        with self.lock:
            self.open += 1
            self.most_open = max(self.most_open, self.open)
        return SlowRun(self)

    def vocabulary(self) -> Any:
        raise NotImplementedError

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        return b"t"

    def close(self) -> None:
        self.closed = True


async def collect(tier: EngineLocalTier) -> str:
    run = await tier.start(MESSAGES, PARAMS)
    try:
        return "".join([token.text async for token in run])
    finally:
        await run.aclose()


def test_a_whole_answer() -> None:
    async def test() -> None:
        tier = EngineLocalTier(engine := SlowEngine())
        run = await tier.start(MESSAGES, PARAMS)
        assert run.answer.prompt_tokens == 3
        texts = [token.text async for token in run]
        await run.aclose()
        answer = run.answer
        assert len(texts) == len(answer.tokens) == 5
        assert answer.text == "".join(texts) + "held back", "the engine's own text is the last word"
        assert len(answer.signals) == 6
        assert answer.finish_reason == "stop"
        assert answer.answer_hidden is not None
        assert answer.prompt_hidden is not None
        await tier.aclose()
        await tier.aclose()
        assert engine.closed

    asyncio.run(test())


def test_requests_run_together_and_all_finish() -> None:
    async def test() -> None:
        tier = EngineLocalTier(engine := SlowEngine())
        engine.delay_s = 0.01
        assert len(set(await asyncio.gather(*[collect(tier) for _ in range(20)]))) == 1
        assert engine.most_open > 5
        assert engine.open == 0
        await tier.aclose()

    asyncio.run(test())


def test_closing_stops_the_answer_at_once() -> None:
    async def test() -> None:
        tier = EngineLocalTier(engine := SlowEngine())
        engine.length, engine.delay_s = 10_000, 0.01
        run = await tier.start(MESSAGES, PARAMS)
        await anext(aiter(run))
        begun = time.monotonic()
        await run.aclose()
        await run.aclose()
        assert time.monotonic() - begun < 50, "not the 100 s that are left of it"
        assert engine.open == 0
        assert run.answer.finish_reason is None
        with pytest.raises(StopAsyncIteration):
            await anext(run)
        await tier.aclose()

    asyncio.run(test())


def test_failures_are_typed() -> None:
    async def test() -> None:
        tier = EngineLocalTier(engine := SlowEngine())
        with pytest.raises(ContextLengthError):
            await tier.start([Message(role="user", content="long")], PARAMS)
        engine.fails_at = 2
        with pytest.raises(EngineError, match="decode failed"):
            await collect(tier)
        engine.fails_at = -1
        assert await collect(tier)
        assert engine.open == 0
        await tier.aclose()

    asyncio.run(test())
