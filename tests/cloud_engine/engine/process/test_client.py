"""The asyncio client: concurrent streams, aborts by closing or cancelling, and failures that everybody hears of."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
from threaded_engine import ThreadedEngine
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.process.loop import FAILURES_TO_GIVE_UP
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.protocol.errors import (
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
)
from updraft.protocol.sampling import SamplingParams


def with_engine(engine: Engine, scenario: Callable[[ThreadedEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        served = ThreadedEngine(engine)
        await served.start()
        try:
            await asyncio.wait_for(scenario(served), 60)
        finally:
            await served.close()
        assert served.failure is not None

    asyncio.run(main())


async def collect(engine: ThreadedEngine, request: GenerationRequest) -> list[int]:
    return [token async for output in engine.generate(request) for token in output.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the engine's counters are no events
            await asyncio.sleep(0.002)


def endless(name: str, prompt: int = 1) -> GenerationRequest:
    return GenerationRequest(name, [prompt, 2], SamplingParams(temperature=0.0, max_tokens=190))


def test_concurrent_requests_get_their_own_answers(make_engine, make_prompts, ask, run):
    requests = ask(make_prompts(12))
    expected = [result.token_ids for result in run(make_engine(), requests)]

    async def scenario(engine: ThreadedEngine) -> None:
        assert engine.failure is None
        assert await asyncio.gather(*(collect(engine, request) for request in requests)) == expected
        assert engine.stats().finished_requests == 12

    with_engine(make_engine(max_num_seqs=4), scenario)


def test_closing_the_iterator_aborts(make_engine):
    async def scenario(engine: ThreadedEngine) -> None:
        stream = engine.generate(endless("a"))
        await anext(stream)
        assert engine.stats().running == 1
        await stream.aclose()
        await until(lambda: engine.stats().aborted_requests == 1)
        assert engine.stats().kv_blocks_used == 0

    with_engine(make_engine(), scenario)


def test_a_step_that_hangs_is_seen_and_a_reader_that_is_slow_is_not_one(make_engine):
    engine, going_on = make_engine(), threading.Event()
    healthy_step = engine.step

    def step():
        assert going_on.wait(60)
        return healthy_step()

    engine.step = step  # type: ignore[method-assign]

    async def scenario(served: ThreadedEngine) -> None:
        assert served.stats().seconds_since_step == 0
        await asyncio.sleep(0.5)
        asked = time.monotonic()
        stream = served.generate(endless("a"))
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.05)
        seconds = served.stats().seconds_since_step
        assert 0.04 < seconds <= time.monotonic() - asked, "since it was asked, not since it was last busy"
        going_on.set()
        await first
        await until(lambda: served.stats().finished_requests == 1)
        assert served.stats().seconds_since_step == 0
        await stream.aclose()

    with_engine(engine, scenario)


def test_cancelling_the_task_aborts_running_and_queued_requests(make_engine):
    async def scenario(engine: ThreadedEngine) -> None:
        tasks = [asyncio.create_task(collect(engine, endless(str(i)))) for i in range(3)]
        await until(lambda: engine.stats().waiting == 2)
        for task in tasks[::-1]:
            task.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True))
        await until(lambda: engine.stats().running + engine.stats().waiting + engine.stats().kv_blocks_used == 0)
        assert len(await collect(engine, endless("next"))) == 190

    with_engine(make_engine(max_num_seqs=1), scenario)


def test_a_bad_request_fails_alone(make_engine):
    async def scenario(engine: ThreadedEngine) -> None:
        good = asyncio.create_task(collect(engine, endless("good")))
        with pytest.raises(ContextLengthError):
            await collect(engine, GenerationRequest("long", [1] * 192))
        with pytest.raises(InvalidRequestError):
            await collect(engine, GenerationRequest("empty", []))
        assert len(await good) == 190
        assert engine.failure is None

    with_engine(make_engine(), scenario)


def test_a_full_queue_refuses(make_engine):
    async def scenario(engine: ThreadedEngine) -> None:
        tasks = [asyncio.create_task(collect(engine, endless(str(i)))) for i in range(6)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(result, OverloadedError) for result in results) >= 1
        assert sum(isinstance(result, list) for result in results) >= 2
        assert all(isinstance(result, list | OverloadedError) for result in results)

    with_engine(make_engine(max_num_seqs=1, max_waiting=2), scenario)


def test_a_request_id_in_use_is_refused(make_engine):
    async def scenario(engine: ThreadedEngine) -> None:
        first = engine.generate(endless("same"))
        await anext(first)
        with pytest.raises(InvalidRequestError, match="in use"):
            await collect(engine, endless("same"))
        await first.aclose()

    with_engine(make_engine(), scenario)


def failing_at(engine: Engine, *bad_steps: int) -> Engine:
    healthy_step, steps = engine.step, iter(range(1000))

    def step():
        if next(steps) in bad_steps:
            raise RuntimeError("the memory is on fire")
        return healthy_step()

    engine.step = step  # type: ignore[method-assign]
    return engine


async def ask_four(served: ThreadedEngine) -> None:
    """Two running and two waiting, and all of them hear of the failure, and whether to ask again."""
    requests = (collect(served, endless(str(i))) for i in range(4))
    for result in await asyncio.gather(*requests, return_exceptions=True):
        assert isinstance(result, EngineError)
        assert result.headers()["x-should-retry"] == "true", "on another node"
        assert "RuntimeError: the memory is on fire" in result.message
        assert isinstance(result.__cause__, RuntimeError)


@pytest.mark.parametrize("bad_steps", [(3,), (3, 4), (3, 60)])
def test_a_failed_step_costs_no_request(bad_steps, make_engine, ask, run, make_prompts):
    requests = ask(make_prompts(6))
    expected = [result.token_ids for result in run(make_engine(), requests)]

    async def scenario(served: ThreadedEngine) -> None:
        assert await asyncio.gather(*(collect(served, request) for request in requests)) == expected
        assert served.failure is None
        assert served.stats().kv_blocks_used == 0
        assert served.stats().preemptions >= 2

    with_engine(failing_at(make_engine(max_num_seqs=2), *bad_steps), scenario)


def test_an_engine_that_keeps_failing_is_down(make_engine):
    async def scenario(served: ThreadedEngine) -> None:
        await ask_four(served)
        assert served.failure is not None
        assert "(RuntimeError: the memory is on fire)" in served.failure.message
        assert served.failure.status == 503
        with pytest.raises(EngineError, match="on fire"):
            await collect(served, endless("later"))

    with_engine(failing_at(make_engine(max_num_seqs=2), *range(3, 3 + FAILURES_TO_GIVE_UP)), scenario)


def test_close_ends_requests_in_flight(make_engine):
    async def main() -> None:
        engine = ThreadedEngine(make_engine())
        with pytest.raises(OverloadedError):
            await collect(engine, endless("too early"))
        await engine.start()
        stream = engine.generate(endless("a"))
        await anext(stream)
        await engine.close()
        with pytest.raises(OverloadedError, match="shutting down"):
            async for _ in stream:
                pass
        await engine.close()

    asyncio.run(main())


def test_a_bug_in_taking_a_request_in_costs_that_request_alone(make_engine, monkeypatch):
    engine = make_engine()
    add = engine.add_request

    def broken(request: GenerationRequest) -> None:
        if request.request_id == "poison":
            raise ValueError("a bug")
        add(request)

    monkeypatch.setattr(engine, "add_request", broken)

    async def scenario(served: ThreadedEngine) -> None:
        with pytest.raises(EngineError, match="ValueError: a bug"):
            await collect(served, endless("poison"))
        assert served.failure is None
        assert len(await collect(served, endless("good"))) == 190

    with_engine(engine, scenario)
