"""When memory runs short, the owner with the most bytes loses the request that has waited longest for its client."""

from __future__ import annotations

import asyncio

import pytest
from updraft.protocol.errors import OverloadedError, RateLimitError
from updraft.protocol.http.body_memory import ROOM_BYTES, SMALL_BYTES, BodyMemory, HeldMemory

MIB = 2**20


async def waits(memory: BodyMemory, held: HeldMemory, size: int) -> None:
    memory.take(held, size)
    async with memory.waiting_for_client(held):
        await asyncio.sleep(60)


def test_the_longest_wait_of_the_largest_owner_ends() -> None:
    async def run() -> None:
        memory = BodyMemory(ROOM_BYTES + 8 * MIB, 6 * MIB)
        held = [HeldMemory(owner) for owner in ("large", "large", "medium")]
        tasks = [
            asyncio.create_task(waits(memory, each, size * MIB)) for each, size in zip(held, (3, 3, 2), strict=True)
        ]
        await asyncio.sleep(0)
        with pytest.raises(RateLimitError):
            memory.take(HeldMemory("large"), MIB)
        with pytest.raises(OverloadedError):
            memory.take(HeldMemory("medium"), 4 * MIB)
        memory.take(small := HeldMemory("new"), SMALL_BYTES)  # there is room for a small one
        memory.take(new := HeldMemory("other"), 2 * MIB)
        with pytest.raises(TimeoutError):
            await tasks[0]
        assert [each.size // MIB for each in held] == [0, 3, 2]
        assert not any(task.done() for task in tasks[1:])
        for each in (*held, small, new):
            memory.give_back(each)
        memory.take(HeldMemory("large"), 6 * MIB)
        for task in tasks[1:]:
            task.cancel()

    asyncio.run(run())


def test_nothing_is_dropped_for_an_owner_that_would_hold_as_much() -> None:
    async def run() -> None:
        memory = BodyMemory(ROOM_BYTES + 4 * MIB, 4 * MIB)
        task = asyncio.create_task(waits(memory, HeldMemory("first"), 4 * MIB))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            memory.take(HeldMemory("second"), 4 * MIB)
        assert not task.done()
        task.cancel()

    asyncio.run(run())
