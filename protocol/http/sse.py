"""Encoding and parsing of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator

from .lenient_json import json_bytes

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients ignore
MAX_EVENT_BYTES = 4 * 2**20  # enough for a whole answer or an image in one event
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_BOM = b"\xef\xbb\xbf"


def event(payload: object) -> bytes:
    """Encode a `data:` event with `payload` as JSON."""
    return b"data: " + json_bytes(payload) + b"\n\n"


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
