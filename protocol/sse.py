"""Server-sent events: the framing of every streamed answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

DONE = b"data: [DONE]\n\n"
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


def event(payload: object) -> bytes:
    """One `data:` event holding `payload` as JSON."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


class EventParser:
    """Splits a byte stream, cut anywhere, into the payloads of its `data:` events (without `[DONE]`)."""

    def __init__(self) -> None:
        self._buffer = b""
        self.done = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads completed by `chunk`; `done` turns true once `[DONE]` was seen."""
        self._buffer = (self._buffer + chunk).replace(b"\r\n", b"\n")
        *events, self._buffer = self._buffer.split(b"\n\n")
        payloads: list[bytes] = []
        for block in events:
            data = b"\n".join(line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:"))
            self.done = self.done or data == b"[DONE]"
            if data and not self.done:
                payloads.append(data)
        return payloads


async def parse(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The payload of each event in `chunks`, ending at `[DONE]` or at the end of the stream."""
    parser = EventParser()
    async for chunk in chunks:
        for payload in parser.feed(chunk):
            yield payload
        if parser.done:
            return
