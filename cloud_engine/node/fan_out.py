"""Several engine requests behind one HTTP request: their outputs as one stream, and one end for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

#: Streams of one HTTP request that run at the same time, so that one client's long list leaves others their places.
AT_ONCE = 16


async def fan_out(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """What `streams` yield, as it comes, each with the number of its stream. The first failure ends them all."""
    waiting = iter(enumerate(streams))
    results: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def work() -> None:
        try:
            for number, stream in waiting:
                async with aclosing(stream):
                    async for item in stream:
                        results.put_nowait((number, item))
            results.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised below, to who reads
            results.put_nowait(error)

    workers = [asyncio.create_task(work()) for _ in streams[:AT_ONCE]]
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
