"""Fan-out of one HTTP request to several engine requests, whose answers are merged into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from ....protocol.errors import OverloadedError

T = TypeVar("T")

#: Maximum concurrent streams of one HTTP request, so that a long list of prompts does not fill the queue.
AT_ONCE = 16
#: Seconds between attempts of an HTTP request to start its next stream while the queue is full.
PAUSE_S = 0.05


async def fan_out(starts: Sequence[Callable[[], AsyncGenerator[T]]]) -> AsyncGenerator[tuple[int, T]]:
    """Start the streams in `starts` and yield their items as they arrive, each with its stream's number.

    The first failure ends all streams. Exception: once the engine has accepted a stream, the streams that find the
    queue full retry.
    """
    waiting = iter(enumerate(starts))
    results: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()
    streams = _Streams(results)

    async def work() -> None:
        try:
            for number, start in waiting:
                await streams.run(number, start)
            results.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised below in the reader
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
    """Runs streams into `results`, and tracks whether the engine has accepted any of them."""

    def __init__(self, results: asyncio.Queue[tuple[int, T] | Exception | None]) -> None:
        self._results = results
        self._taken_up = False
        self._num_open = 0
        self._retrying = asyncio.Lock()

    async def run(self, number: int, start: Callable[[], AsyncGenerator[T]]) -> None:
        """Run one stream to its end, retrying while the queue is full. Raises the stream's other errors."""
        while not await self._run_if_accepted(number, start):
            async with self._retrying:  # one retry at a time, so that a long list does not flood the engine
                await asyncio.sleep(PAUSE_S)

    async def _run_if_accepted(self, number: int, start: Callable[[], AsyncGenerator[T]]) -> bool:
        began = False
        self._num_open += 1
        try:
            async with aclosing(start()) as stream:
                async for item in stream:
                    began = self._taken_up = True
                    self._results.put_nowait((number, item))
            self._taken_up = True
        except OverloadedError as error:
            has_other_stream = self._taken_up or self._num_open > 1  # their ends free capacity: try again later
            if began or not has_other_stream or error.code in ("draining", "sleeping"):
                raise
            return False
        finally:
            self._num_open -= 1
        return True
