"""Several streams as one: everything comes out, nothing is left running, and one failure is everybody's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.cloud_engine.node.answers.fan_out import AT_ONCE, fan_out
from updraft.protocol.errors import OverloadedError


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


@given(st.lists(st.integers(0, 5), max_size=3 * AT_ONCE))
def test_every_stream_comes_out_whole_and_in_its_order(counts: list[int]) -> None:
    async def main() -> None:
        streams = Streams()
        received: list[list[int]] = [[] for _ in counts]
        async with asyncio.timeout(60):
            async for number, item in fan_out([partial(streams.of, count) for count in counts]):
                received[number].append(item)
        assert received == [list(range(count)) for count in counts]
        assert streams.open == 0
        assert streams.most_open <= AT_ONCE

    asyncio.run(main())


def test_the_first_failure_ends_all() -> None:
    async def main() -> None:
        streams = Streams()
        several = [
            partial(streams.of, 3, hangs=True),
            partial(streams.of, 1, fails=True),
            partial(streams.of, 2, hangs=True),
        ]
        with pytest.raises(ValueError, match="this one failed"):
            async for _ in fan_out(several):
                pass
        assert streams.open == 0

    asyncio.run(main())


def test_closing_closes_all() -> None:
    async def main() -> None:
        streams = Streams()
        async with aclosing(fan_out([partial(streams.of, 9, hangs=True) for _ in range(AT_ONCE + 5)])) as all_of_them:
            await anext(all_of_them)
            assert streams.open == AT_ONCE
        assert streams.open == 0

    asyncio.run(main())


class Places:
    """A queue with a limit, which others fill as soon as there is a free place, but for every third time."""

    def __init__(self, most: int, *, taken: bool = False, closes: bool = False) -> None:
        self.free = 0 if taken else most
        self.requested = 0
        self._most, self._closes = most, closes

    async def stream(self) -> AsyncGenerator[int]:
        self.requested += 1
        turn = self.requested
        await asyncio.sleep(0)
        if self._closes and turn > self._most:
            raise OverloadedError("It is shutting down.", code="draining")
        if not self.free or (turn > self._most and turn % 3):
            raise OverloadedError("The queue is full.")
        self.free -= 1
        try:
            for item in range(2):
                await asyncio.sleep(0.001)
                yield item
        finally:
            self.free += 1


def outputs_of(places: Places, num_streams: int) -> list[tuple[int, int]]:
    async def main() -> list[tuple[int, int]]:
        async with asyncio.timeout(30):
            return [output async for output in fan_out([places.stream] * num_streams)]

    return asyncio.run(main())


@pytest.mark.parametrize("most", [1, 3, AT_ONCE])
def test_a_job_that_was_taken_up_waits_for_places(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("updraft.cloud_engine.node.answers.fan_out.PAUSE_S", 0.001)
    outputs = outputs_of(Places(most), AT_ONCE + 20)
    assert sorted(outputs) == [(number, item) for number in range(AT_ONCE + 20) for item in range(2)]


def test_a_job_for_which_there_is_no_place_at_all_is_refused() -> None:
    places = Places(1, taken=True)
    with pytest.raises(OverloadedError, match="queue is full"):
        outputs_of(places, AT_ONCE + 20)
    assert places.requested == AT_ONCE


def test_no_job_waits_for_a_server_that_shuts_down() -> None:
    with pytest.raises(OverloadedError, match="shutting down"):
        outputs_of(Places(3, closes=True), AT_ONCE)
