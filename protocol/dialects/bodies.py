"""Streamed response body translated from one API to another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress

from ..http import sse
from ..http.wire import close_body


class TranslatedBody:
    """Stream of events that `events` encodes from the payloads of `body`. `aclose` also closes an unread `body`."""

    def __init__(
        self, body: AsyncIterator[bytes], events: Callable[[AsyncIterator[bytes]], AsyncGenerator[bytes]]
    ) -> None:
        self._body = body
        self._events = events(sse.parse(body))

    def __aiter__(self) -> TranslatedBody:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._events)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Close the stream and `body`. Idempotent; the caller must first cancel a pending `__anext__`."""
        try:
            with suppress(RuntimeError):  # `aclose` raises it while `__anext__` is pending
                await self._events.aclose()
        finally:
            await close_body(self._body)
