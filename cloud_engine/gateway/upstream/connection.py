"""One HTTP/1.1 connection to a node, for one request at a time."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from ....protocol.http.body_memory import SMALL_BYTES
from .failures import UpstreamFailure, UpstreamTimeout
from .response_parser import Headers, ResponseParser


@dataclass(frozen=True, slots=True)
class SilenceTimeouts:
    """Timeouts for a node that sends no data."""

    # Maximum wait for the first bytes of the body, in seconds.
    first_s: float = math.inf
    # Maximum wait between two pieces of the body, in seconds.
    idle_s: float = math.inf


class ClosedUnansweredError(UpstreamFailure):
    """The connection was closed before any byte of the response."""


class UnreadRequestError(ClosedUnansweredError):
    """The connection was closed before the whole request was sent, perhaps because the request is too large."""


class NodeConnection(asyncio.Protocol):
    """HTTP/1.1 client protocol. `on_lost` is called if an idle connection closes, `on_data` when data arrives."""

    def __init__(self, on_lost: Callable[[NodeConnection], None], on_data: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self._on_data = on_data
        self._loop = asyncio.get_running_loop()
        self._parser = ResponseParser()
        self._chunks: deque[bytes] = deque()
        self._unread = 0
        self._has_body = False
        self._is_paused = False
        self._is_sending = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._limit_s = self._deadline = math.inf
        self._timeouts = SilenceTimeouts()
        self._failure: UpstreamFailure | None = None
        self._is_busy = False
        self.idle_since = 0.0  # 0 if the connection has not served a request yet

    @property
    def is_reusable(self) -> bool:
        parser = self._parser
        is_over = parser.complete and not self._chunks and not self._is_sending
        return is_over and parser.reusable and self._failure is None

    def close(self) -> None:
        """Close at once; unsent and unread data is dropped."""
        if self._timer is not None:
            self._timer.cancel()
        self._transport.abort()

    async def request(self, payload: bytes, timeouts: SilenceTimeouts) -> tuple[int, Headers]:
        """Send a request, and return the status and headers of the response. Raises UpstreamFailure."""
        self._parser, self._timeouts, self._is_busy = ResponseParser(), timeouts, True
        if self._failure is not None:
            raise self._failure
        self._transport.write(payload)
        while not self._parser.status:
            await self._wait(timeouts.first_s)
        return self._parser.status, self._parser.headers

    async def wait_for_body(self) -> None:
        """Wait for the first bytes of the body, or its end. Raises UpstreamFailure."""
        while not (self._chunks or self._parser.complete):
            await self._wait(self._timeouts.first_s)

    async def read(self) -> bytes:
        """Return the next bytes of the body, at most `SMALL_BYTES`; empty at the end. Raises UpstreamFailure."""
        while not self._chunks:
            if self._parser.complete:
                return b""
            await self._wait(self._timeouts.idle_s if self._has_body else self._timeouts.first_s)
        body = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        body, rest = body[:SMALL_BYTES], body[SMALL_BYTES:]
        if rest:
            self._chunks.append(rest)
        self._unread -= len(body)
        if self._is_paused and self._unread <= SMALL_BYTES:
            self._is_paused = False
            self._transport.resume_reading()
        return body

    def rest(self) -> None:
        """Mark the connection idle: the response is complete, and any further data is unexpected."""
        self._is_busy, self._has_body, self.idle_since = False, False, self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport has no asyncio base class
        self._transport.set_write_buffer_limits(0)  # call `pause_writing` as long as any byte is unsent

    def pause_writing(self) -> None:
        self._is_sending = True

    def resume_writing(self) -> None:
        self._is_sending = False

    def data_received(self, data: bytes) -> None:
        if not self._is_busy:
            self._transport.abort()  # the node sent data without a request
            return
        self._on_data()
        try:
            body = self._parser.feed(data)
        except UpstreamFailure as failure:
            self.fail(failure)
            self._transport.abort()
            return
        if body:
            self._chunks.append(body)
            self._unread += len(body)
            self._has_body = True
            if self._unread > SMALL_BYTES and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_busy:
            self._failure = self._failure or ClosedUnansweredError("the node closed the connection without an answer")
            self._on_lost(self)
            return
        try:
            if exc is None:
                self._parser.feed_end()
                self._wake()
                return
            failure = UpstreamFailure(f"{type(exc).__name__}: {exc}")
        except UpstreamFailure as error:
            failure = error
        if self._is_sending:
            failure = UnreadRequestError("the node closed the connection before it had the whole request")
        elif not self._parser.has_begun:
            failure = ClosedUnansweredError("the node closed the connection without an answer")
        self.fail(failure)

    async def _wait(self, limit_s: float) -> None:
        """Wait for data. Raises UpstreamFailure, or UpstreamTimeout after `limit_s`."""
        if self._failure is not None:
            raise self._failure
        waiter = self._waiter = self._loop.create_future()
        if limit_s < math.inf:
            self._limit_s, self._deadline = limit_s, self._loop.time() + limit_s
            if self._timer is not None and self._timer.when() > self._deadline:
                self._timer.cancel()
                self._timer = None
            self._timer = self._timer or self._loop.call_at(self._deadline, self._check_deadline)
        try:
            await waiter
        finally:
            self._waiter, self._deadline = None, math.inf

    def _check_deadline(self) -> None:
        """Fail once the deadline has passed, else re-arm the timer. One timer serves all waits, to save time."""
        self._timer = None
        if self._deadline <= self._loop.time():
            self.fail(UpstreamTimeout(f"the node was silent for {self._limit_s:g} s"))
        elif self._deadline < math.inf:
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)

    def fail(self, failure: UpstreamFailure) -> None:
        """Fail the request in flight."""
        self._failure = self._failure or failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            if self._failure is not None:
                self._waiter.set_exception(self._failure)
            else:
                self._waiter.set_result(None)
