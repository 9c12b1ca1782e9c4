"""A node's stream, cut at event borders and in one spelling."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from ....protocol.decoding import UNREADABLE, prepare_types
from ....protocol.http import sse
from ....protocol.http.foreign import apart
from ..upstream.client import Response
from ..upstream.failures import AnswerTooLargeError

FINISH = re.compile(rb'"finish_reason":\s?"')


class _Piece(msgspec.Struct):
    delta: dict[str, Any] | None = None


prepare_types(_Piece)


async def events_of(response: Response) -> AsyncGenerator[list[bytes]]:
    """The stream cut at event borders, in one spelling: the events of each read together.

    What is left of a broken event is dropped. Raises UpstreamFailure.
    """
    parser = sse.EventParser()
    while chunk := await response.read():
        try:
            events = parser.events(chunk)
        except sse.EventTooLongError as error:
            raise AnswerTooLargeError(str(error)) from error
        yield [spelled for event in events for spelled in _in_one_spelling(event)]


def _in_one_spelling(event: bytes) -> list[bytes]:
    if event.startswith(b"data: {") and b"\n" not in event and FINISH.search(event) is None:
        return [event + b"\n\n"]  # nearly all of them
    data = sse.data_of(event)
    if not data:
        return [event + b"\n\n"]  # a sign of life
    if b"\n" in data:
        data = data.replace(b"\n", b" ")
    return [b"data: " + piece + b"\n\n" for piece in _finish_apart(data)]


def _finish_apart(data: bytes) -> list[bytes]:
    """The last text and the finish as OpenAI sends them, one after the other: some servers send both at once."""
    if FINISH.search(data) is None:
        return [data]
    try:
        event = msgspec.json.decode(data, type=dict[str, Any])
        msgspec.convert(event.get("choices"), list[_Piece])
    except UNREADABLE:
        return [data]
    text, finish = apart(event)
    return [data] if text is None else [msgspec.json.encode(text), msgspec.json.encode(finish)]
