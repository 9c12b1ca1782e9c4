"""The local tier over an engine: its record of an answer, cancellation, failures, and many requests at once."""

from __future__ import annotations

import asyncio
import time

import pytest
from router_fakes import SlowEngine
from updraft.protocol.errors import ContextLengthError, EngineError
from updraft.protocol.requests import Message
from updraft.protocol.sampling import SamplingParams
from updraft.router.tiers.local import EngineLocalTier

MESSAGES = [Message(role="user", content="hi")]
PARAMS = SamplingParams()


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
