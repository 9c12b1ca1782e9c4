"""Several engine requests behind one HTTP request: their outputs as one stream, and one end for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from ....protocol.errors import OverloadedError

T = TypeVar("T")

#: Streams of one HTTP request that run at the same time, so that one client's long list leaves others their places.
AT_ONCE = 16
#: Between two tries of one HTTP request to find a place for its next stream, where the queue was full.
PAUSE_S = 0.05


async def fan_out(starts: Sequence[Callable[[], AsyncGenerator[T]]]) -> AsyncGenerator[tuple[int, T]]:
    """The items of all streams that `starts` begin, as they come, each with the number of its stream.

    The first failure ends them all, except that the first streams to be taken up decide for all: those that find the
    queue full later are begun again until they find a place.
    """
    waiting = iter(enumerate(starts))
    results: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()
    streams = _Streams(results)

    async def work() -> None:
        try:
            for number, start in waiting:
                await streams.run(number, start)
            results.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised below, to who reads
            results.put_nowait(error)

    workers = [asyncio.create_task(work()) for _ in starts[:AT_ONCE]]
    at_work = len(workers)
    try:
        while at_work:
            result = await results.get()
            if isinstance(result, Exception):
                raise result
            if result is None:
                at_work -= 1
            else:
                yield result
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


class _Streams(Generic[T]):
    """Runs streams into `results`, and knows whether any of them has been taken up."""

    def __init__(self, results: asyncio.Queue[tuple[int, T] | Exception | None]) -> None:
        self._results = results
        self._taken_up = False
        self._num_open = 0
        self._knocking = asyncio.Lock()

    async def run(self, number: int, start: Callable[[], AsyncGenerator[T]]) -> None:
        """All of one stream, begun as often as it takes to find a place. Raises what it raises otherwise."""
        while not await self._run_if_room(number, start):
            async with self._knocking:  # one at a time, or a long list would keep the engine busy with refusals
                await asyncio.sleep(PAUSE_S)

    async def _run_if_room(self, number: int, start: Callable[[], AsyncGenerator[T]]) -> bool:
        began = False
        self._num_open += 1
        try:
            async with aclosing(start()) as stream:
                async for item in stream:
                    began = self._taken_up = True
                    self._results.put_nowait((number, item))
            self._taken_up = True
        except OverloadedError as error:
            others = self._taken_up or self._num_open > 1  # an open one is taken up, or decides when it is refused
            if began or not others or error.code == "draining":
                raise
            return False
        finally:
            self._num_open -= 1
        return True
