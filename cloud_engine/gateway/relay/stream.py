"""A node's stream, cut at event borders and in one spelling."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from ....protocol.http import sse
from ....protocol.http.foreign import apart
from ..upstream.client import Response, UpstreamFailure, body_of

FINISH = re.compile(rb'"finish_reason":\s?"')


class _Piece(msgspec.Struct):
    delta: dict[str, Any] | None = None


async def events_of(response: Response) -> AsyncGenerator[bytes]:
    """The stream cut at event borders, in one spelling; what is left of a broken event is dropped."""
    parser = sse.EventParser()
    async with aclosing(body_of(response)) as chunks:
        async for chunk in chunks:
            try:
                events = parser.events(chunk)
            except sse.EventTooLongError as error:
                raise UpstreamFailure(str(error)) from error
            for event in events:
                data = sse.data_of(event).replace(b"\n", b" ")
                if data:
                    for piece in _finish_apart(data):
                        yield b"data: " + piece + b"\n\n"
                else:
                    yield event + b"\n\n"  # a sign of life


def _finish_apart(data: bytes) -> list[bytes]:
    """The last text and the finish as OpenAI sends them, one after the other: some servers send both at once."""
    if FINISH.search(data) is None:
        return [data]
    try:
        event = msgspec.json.decode(data, type=dict[str, Any])
        msgspec.convert(event.get("choices"), list[_Piece])
    except msgspec.DecodeError:
        return [data]
    text, finish = apart(event)
    return [data] if text is None else [msgspec.json.encode(text), msgspec.json.encode(finish)]
