"""Server-sent events: the framing of every streamed answer."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import msgspec

DONE = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 4 * 2**20  # events are a word each, but some servers send a whole answer or a picture in one
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_END = re.compile(rb"\r?\n\r?\n")


def event(payload: object) -> bytes:
    """One `data:` event holding `payload` as JSON."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


class EventTooLongError(ValueError):
    """An event that has not ended after `MAX_EVENT_BYTES`."""


class EventParser:
    """Splits a byte stream, cut anywhere, into the payloads of its `data:` events (without `[DONE]`)."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.done = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads completed by `chunk`; `done` turns true once `[DONE]` was seen. Raises EventTooLongError."""
        seen = max(0, len(self._buffer) - 3)  # the rest was searched before; an end may be cut in its middle
        self._buffer += chunk
        payloads: list[bytes] = []
        begin = 0
        for end in _END.finditer(self._buffer, seen):
            lines = self._buffer[begin : end.start()].splitlines()
            begin = end.end()
            data = b"\n".join(bytes(line[5:].removeprefix(b" ")) for line in lines if line.startswith(b"data:"))
            self.done = self.done or data == b"[DONE]"
            if data and not self.done:
                payloads.append(data)
        del self._buffer[:begin]
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event of the stream is longer than {MAX_EVENT_BYTES} bytes")
        return payloads


async def parse(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The payload of each event in `chunks`, ending at `[DONE]` or at the end of the stream."""
    parser = EventParser()
    async for chunk in chunks:
        for payload in parser.feed(chunk):
            yield payload
        if parser.done:
            return
