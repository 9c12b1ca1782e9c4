"""The local tier over a synchronous engine: turns, cancellation, failures, and nothing left running."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from router_fakes import FakeSignals, FakeToken
from updraft.protocol.errors import ContextLengthError, EngineError
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams
from updraft.router.local_tier import EngineLocalTier

MESSAGES = [Message(role="user", content="hi")]
PARAMS = SamplingParams()


class SlowRun:
    """Like `LocalRun`: decodes on the thread that iterates it, stops after `cancel`."""

    prompt_tokens = 3
    prompt_hidden = np.zeros(4, dtype=np.float32)
    prompt_logprobs = np.zeros(2, dtype=np.float32)

    def __init__(self, engine: SlowEngine) -> None:
        self._engine = engine
        self._cancelled = threading.Event()
        self.signals: list[Any] = []
        self.text = ""
        self.finish_reason: Any = None
        self.answer_hidden: Any = None

    def __iter__(self) -> Iterator[FakeToken]:
        for index in range(self._engine.length):
            if self._cancelled.wait(self._engine.delay_s):
                return
            if index == self._engine.fails_at:
                raise ZeroDivisionError("decode failed")
            token = FakeToken(index, f"t{index} ", FakeSignals())
            self.signals.append(token.signals)
            self.text += token.text
            yield token
        self.signals.append(FakeSignals())
        self.text += "held back"
        self.finish_reason = "stop"
        self.answer_hidden = np.ones(4, dtype=np.float32)

    def cancel(self) -> None:
        self._cancelled.set()

    def close(self) -> None:
        self._engine.open -= 1


class SlowEngine:
    model_id = "slow"

    def __init__(self) -> None:
        self.length, self.delay_s, self.fails_at = 5, 0.0, -1
        self.open = self.most_open = 0
        self.closed = False

    def start(self, messages: Any, params: Any, *, continue_final_message: bool = False) -> SlowRun:
        if messages[0].content == "long":
            raise ContextLengthError("too long")
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        return SlowRun(self)

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


def test_requests_take_turns_and_all_finish() -> None:
    async def test() -> None:
        tier = EngineLocalTier(engine := SlowEngine())
        engine.delay_s = 0.001
        assert len(set(await asyncio.gather(*[collect(tier) for _ in range(20)]))) == 1
        assert (engine.most_open, engine.open) == (1, 0)
        await tier.aclose()

    asyncio.run(test())


def test_closing_stops_the_decoding_at_once() -> None:
    async def test() -> None:
        tier = EngineLocalTier(engine := SlowEngine())
        engine.length, engine.delay_s = 10_000, 0.01
        run = await tier.start(MESSAGES, PARAMS)
        await anext(aiter(run))
        begun = time.monotonic()
        await run.aclose()
        assert time.monotonic() - begun < 2
        assert engine.open == 0
        assert run.answer.finish_reason is None
        with pytest.raises(StopAsyncIteration):
            await anext(run)
        engine.length = 2
        assert await collect(tier), "the next one has its turn"
        await tier.aclose()

    asyncio.run(test())


def test_cancelling_while_waiting_for_a_turn() -> None:
    async def test() -> None:
        tier = EngineLocalTier(engine := SlowEngine())
        engine.length, engine.delay_s = 10_000, 0.01
        first = await tier.start(MESSAGES, PARAMS)
        waiting = [asyncio.create_task(collect(tier)) for _ in range(3)]
        await asyncio.sleep(0.05)
        for task in waiting:
            task.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*waiting, return_exceptions=True)
        )
        await first.aclose()
        engine.length = 1
        assert await collect(tier)
        await tier.aclose()

    asyncio.run(test())


def test_an_abandoned_run_does_not_block_the_next() -> None:
    async def test() -> None:
        tier = EngineLocalTier(SlowEngine())
        await tier.start(MESSAGES, PARAMS)
        assert await asyncio.wait_for(collect(tier), 10)
        await tier.aclose()

    asyncio.run(test())


def test_failures_are_typed_and_pass_the_turn_on() -> None:
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
