"""Concurrent local runs for one request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_AT_ONCE = 8


async def run_concurrently(count: int, one: Callable[[int], Awaitable[T]]) -> list[T]:
    """Return the results of `one(0)` to `one(count - 1)`, a few at once. If one fails, the others are cancelled."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def placed(index: int) -> T:
        async with places:
            return await one(index)

    tasks = [asyncio.create_task(placed(index)) for index in range(count)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
