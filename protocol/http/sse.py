"""Encoding, parsing and translation of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress

from ..errors import UpstreamError
from .lenient_json import json_line
from .wire import close_body

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients ignore
MAX_EVENT_BYTES = 4 * 2**20  # enough for a whole answer or an image in one event
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_BOM = b"\xef\xbb\xbf"


def event(payload: object) -> bytes:
    """Encode a `data:` event with `payload` as JSON."""
    return b"data: " + json_line(payload) + b"\n"


class EventTooLongError(ValueError):
    """An event is longer than `MAX_EVENT_BYTES`."""


class EventParser:
    """Incremental parser of events, with lines that end in LF, CR LF or CR. Skips a byte order mark at the start."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at_start = True
        self._after_cr = False  # whether the last chunk ended in CR, possibly the first half of CR LF
        self.done = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return payloads completed by `chunk`; `[DONE]` sets `done`. Raises EventTooLongError."""
        payloads: list[bytes] = []
        for each in self.events(chunk):
            data = data_of(each)
            self.done = self.done or data == b"[DONE]"
            if data and not self.done:
                payloads.append(data)
        return payloads

    def events(self, chunk: bytes) -> list[bytes]:
        """Return events completed by `chunk`, including comments, with lines ending in LF. Raises EventTooLongError."""
        is_between = not (self._buffer or self._at_start or self._after_cr)  # whether the next byte starts a new event
        if chunk[-3:-1] != b"\n\n" and chunk.endswith(b"\n\n") and is_between and b"\r" not in chunk:
            return chunk[:-2].split(b"\n\n")  # fast path for most chunks
        searched = max(0, len(self._buffer) - 1)  # search the last byte again: it may begin an event's end
        self._buffer += self._with_line_feeds(chunk)
        if self._at_start and not _BOM.startswith(self._buffer):
            self._at_start = False
            if self._buffer.startswith(_BOM):
                del self._buffer[: len(_BOM)]
                searched = 0
        events: list[bytes] = []
        begin = 0
        while (end := self._buffer.find(b"\n\n", max(searched, begin))) >= 0:
            events.append(bytes(self._buffer[begin:end]))
            begin = end + 2
        del self._buffer[:begin]
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event of the stream is longer than {MAX_EVENT_BYTES} bytes")
        return events

    @property
    def rest(self) -> bytes:
        """Bytes of an incomplete event at the end of the input."""
        return bytes(self._buffer)

    def _with_line_feeds(self, chunk: bytes) -> bytes:
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._after_cr = False
        if chunk:
            self._after_cr = chunk.endswith(b"\r")
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in chunk else chunk


def data_of(raw: bytes) -> bytes:
    """Return the payload of an event; empty if the event has no `data:` line."""
    return b"\n".join(line[5:].removeprefix(b" ") for line in raw.split(b"\n") if line.startswith(b"data:"))


async def parse(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the payload of each event, until `[DONE]` or the end of the stream."""
    parser = EventParser()
    async for chunk in chunks:
        for payload in parser.feed(chunk):
            yield payload
        if parser.done:
            return


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
        async for payload in parse(self._body):
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
