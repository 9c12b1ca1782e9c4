"""Sleep and wake: memory is released, requests in flight finish, and answers are the same afterwards."""

from __future__ import annotations

import asyncio

import pytest
from threaded_engine import ThreadedEngine, with_engine
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.protocol.errors import ConflictError, EngineDownError, OverloadedError
from updraft.protocol.sampling import SamplingParams


def request(name: str, max_tokens: int = 150) -> GenerationRequest:
    return GenerationRequest(name, list(range(40)), SamplingParams(temperature=0.7, seed=3, max_tokens=max_tokens))


async def tokens(engine: ThreadedEngine, request: GenerationRequest) -> list[int]:
    return [token async for output in engine.generate(request) for token in output.token_ids]


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_sleeping_engine_holds_no_kv_cache(backend, make_engine, draft):
    engine = make_engine(draft=draft, attention_backend=backend)
    caches = [runner._backend for runner in engine._runners]
    assert len(caches) == 2

    async def scenario(served: ThreadedEngine) -> None:
        expected = await tokens(served, request("before"))
        for _ in range(2):
            await served.sleep(1, 60)
            await served.sleep(1, 60)
            assert served.sleep_level == 1
            assert [cache.cache.numel() for cache in caches] == [0, 0]
            with pytest.raises(OverloadedError) as refused:
                await tokens(served, request("asleep"))
            assert (refused.value.status, refused.value.code) == (503, "sleeping")
            with pytest.raises(ConflictError, match="sleeps at level 1"):
                await served.sleep(2, 60)
            await served.wake()
            await served.wake()
            assert (served.sleep_level, served.failure) == (0, None)
            assert await tokens(served, request("after")) == expected

    with_engine(engine, scenario)


def test_requests_in_flight_finish_first(make_engine):
    async def scenario(served: ThreadedEngine) -> None:
        expected = await tokens(served, request("alone"))
        running = asyncio.create_task(tokens(served, request("running")))
        await asyncio.sleep(0)
        await served.sleep(1, 60)
        assert running.done() or await running
        assert running.result() == expected

    with_engine(make_engine(), scenario)


def test_a_drain_that_takes_too_long_is_a_conflict_and_the_engine_serves(make_engine):
    async def scenario(served: ThreadedEngine) -> None:
        running = asyncio.create_task(tokens(served, request("running")))
        await asyncio.sleep(0)
        with pytest.raises(ConflictError, match="1 requests are in flight"):
            await served.sleep(1, 0.0)
        assert (served.sleep_level, served.failure) == (0, None)
        assert len(await running) == 150
        assert len(await tokens(served, request("next"))) == 150

    with_engine(make_engine(), scenario)


def test_an_engine_that_cannot_wake_up_is_down(make_engine):
    engine = make_engine()

    def out_of_memory() -> None:
        raise MemoryError("the device is full")

    engine.wake = out_of_memory  # type: ignore[method-assign]

    async def scenario(served: ThreadedEngine) -> None:
        await served.sleep(1, 60)
        with pytest.raises(EngineDownError, match="the device is full"):
            await served.wake()
        assert served.failure is not None and served.failure.code == "engine_down"

    with_engine(engine, scenario)


def test_closing_ends_a_sleep(make_engine):
    async def scenario(served: ThreadedEngine) -> None:
        await served.sleep(1, 60)
        await served.close()
        with pytest.raises(OverloadedError, match="shutting down"):
            await served.sleep(1, 60)

    with_engine(make_engine(), scenario)
