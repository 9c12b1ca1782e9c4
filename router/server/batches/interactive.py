"""Tracking of interactive requests, so that batches can wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace

from ....protocol.http.wire import WireResponse, close_body


class InteractiveRequests:
    """Counter of interactive requests in progress. A streamed answer counts until its end."""

    def __init__(self) -> None:
        self._running = 0
        self._none = asyncio.Event()
        self._none.set()

    async def counted(self, answer: Awaitable[WireResponse]) -> WireResponse:
        self._running += 1
        self._none.clear()
        try:
            response = await answer
        except BaseException:
            self._end()
            raise
        if isinstance(response.body, bytes):
            self._end()
            return response
        return replace(response, body=TrackedBody(response.body, self._end))

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no request is in progress. Return False if `timeout_s` seconds are not enough."""
        return await is_set_within(self._none, timeout_s)

    def _end(self) -> None:
        self._running -= 1
        if not self._running:
            self._none.set()


async def is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for `event`. Return False if `timeout_s` seconds are not enough."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False


class TrackedBody:
    """Streamed body that calls `end` once, when the stream ends or is closed."""

    def __init__(self, body: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        self._body = body
        self._ending = ExitStack()  # calls `end` only once
        self._ending.callback(end)

    def __aiter__(self) -> TrackedBody:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._body)
        except BaseException:
            self._ending.close()
            raise

    async def aclose(self) -> None:
        self._ending.close()
        await close_body(self._body)
