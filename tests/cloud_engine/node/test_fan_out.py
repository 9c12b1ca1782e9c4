"""Several streams as one: everything comes out, nothing is left running, and one failure is everybody's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from updraft.cloud_engine.node.fan_out import AT_ONCE, fan_out


class Streams:
    """Streams of numbers that count how many of them are open."""

    def __init__(self) -> None:
        self.open = self.most_open = 0

    async def of(self, count: int, *, fails: bool = False, hangs: bool = False) -> AsyncGenerator[int]:
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            for item in range(count):
                await asyncio.sleep(0)
                yield item
            if hangs:
                await asyncio.sleep(3600)
            if fails:
                raise ValueError("this one failed")
        finally:
            self.open -= 1


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), max_size=3 * AT_ONCE))
def test_every_stream_comes_out_whole_and_in_its_order(counts: list[int]) -> None:
    async def main() -> None:
        streams = Streams()
        seen: list[list[int]] = [[] for _ in counts]
        async with asyncio.timeout(60):
            async for number, item in fan_out([streams.of(count) for count in counts]):
                seen[number].append(item)
        assert seen == [list(range(count)) for count in counts]
        assert streams.open == 0
        assert streams.most_open <= AT_ONCE

    asyncio.run(main())


def test_the_first_failure_ends_all() -> None:
    async def main() -> None:
        streams = Streams()
        several = [streams.of(3, hangs=True), streams.of(1, fails=True), streams.of(2, hangs=True)]
        with pytest.raises(ValueError, match="this one failed"):
            async for _ in fan_out(several):
                pass
        assert streams.open == 0

    asyncio.run(main())


def test_closing_closes_all() -> None:
    async def main() -> None:
        streams = Streams()
        async with aclosing(fan_out([streams.of(9, hangs=True) for _ in range(AT_ONCE + 5)])) as all_of_them:
            await anext(all_of_them)
            assert streams.open == AT_ONCE
        assert streams.open == 0

    asyncio.run(main())
