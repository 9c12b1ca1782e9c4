"""Pieces of a stream cross to the reader's thread together where they are ready, and none is read far ahead of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from updraft.sdk.read_ahead import ReadAhead


def test_ready_items_arrive_together() -> None:
    async def run() -> None:
        gate = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield b"a"
            yield b"b"
            await gate.wait()
            yield b"c"

        ahead = ReadAhead(body())
        assert await ahead.take() == (b"ab", False)
        late = asyncio.create_task(ahead.take())
        await asyncio.sleep(0)
        assert not late.done()
        gate.set()
        assert await late == (b"c", True)

    asyncio.run(run())


def test_a_reader_that_is_slow_or_leaves_stops_the_body() -> None:
    async def run() -> None:
        pieces, closed = 0, False

        async def body() -> AsyncIterator[bytes]:
            nonlocal pieces, closed
            try:
                while True:
                    pieces += 1
                    yield b"x" * 1000
                    if pieces % 3 == 0:
                        await asyncio.sleep(0)
            finally:
                closed = True

        ahead, size = ReadAhead(body()), 0
        for _ in range(50):
            taken, _ = await ahead.take()
            size += len(taken)
            for _ in range(5):
                await asyncio.sleep(0)
            assert pieces * 1000 <= size + 1000
        waiting = asyncio.create_task(ahead.take())
        await asyncio.sleep(0)
        waiting.cancel()
        await ahead.aclose()
        assert closed

    asyncio.run(run())


def test_items_before_a_failure_are_delivered() -> None:
    async def run() -> None:
        async def body() -> AsyncIterator[bytes]:
            yield b"a"
            raise OSError("broken")

        ahead = ReadAhead(body())
        assert await ahead.take() == (b"a", False)
        with pytest.raises(OSError, match="broken"):
            await ahead.take()

    asyncio.run(run())
