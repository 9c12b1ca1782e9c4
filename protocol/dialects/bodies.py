"""Streamed response body translated from one API to another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress

from ..errors import UpstreamError
from ..http import sse
from ..http.wire import close_body


class TranslatedBody:
    """Stream of events that `events` encodes from the payloads of `body`. `aclose` also closes an unread `body`.

    `error_event` encodes an UpstreamError that `events` raises. None: the last event of `events` encodes the error.
    If `body` has a method `hold_end`, this class decides the status in the request's ledger row.
    """

    def __init__(
        self,
        body: AsyncIterator[bytes],
        events: Callable[[AsyncIterator[bytes]], AsyncGenerator[bytes]],
        error_event: Callable[[UpstreamError], bytes] | None = None,
    ) -> None:
        self._body = body
        self._events = events(self._payloads())
        self._error_event = error_event
        hold_end: Callable[[], Callable[[int], Awaitable[None]]] | None = getattr(body, "hold_end", None)
        self._end = None if hold_end is None else hold_end()
        self._is_read = False

    def __aiter__(self) -> TranslatedBody:
        return self

    async def __anext__(self) -> bytes:
        events = list[bytes]()
        try:
            events.append(await anext(self._events))
            while self._is_read:  # send the last events together, once the ledger row has its status
                events.append(await anext(self._events))
        except StopAsyncIteration:
            await self._finish(200)
            if not events:
                raise
        except UpstreamError as error:
            await self._finish(error.status)
            if self._error_event is not None:
                events.append(self._error_event(error))
            elif not events:
                raise
        except BaseException as error:
            await self._finish(500 if isinstance(error, Exception) else 499)
            raise
        return b"".join(events)

    async def aclose(self) -> None:
        """Close the stream and `body`. Idempotent; the caller must first cancel a pending `__anext__`."""
        await self._finish(499)

    async def _payloads(self) -> AsyncGenerator[bytes]:
        async for payload in sse.parse(self._body):
            yield payload
        self._is_read = True

    async def _finish(self, status: int) -> None:
        try:
            with suppress(RuntimeError):  # `aclose` raises it while `__anext__` is pending
                await self._events.aclose()
        finally:
            if self._end is not None:
                await self._end(status)
            await close_body(self._body)
