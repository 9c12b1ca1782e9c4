"""A node's event stream, split into events and normalised to OpenAI's format."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ....protocol.decoding import UNREADABLE, prepare_types
from ....protocol.errors import UpstreamError
from ....protocol.http import sse
from ....protocol.http.lenient_json import error_in, split_final_event
from ..upstream.client import Response
from ..upstream.failures import AnswerTooLargeError, UpstreamTimeout

_COMMENTS_FACTOR = 4  # a stream of comments alone is cut after this multiple of the silence timeout
_FINISH = re.compile(rb'"finish_reason":\s?"')


class _Piece(msgspec.Struct):
    delta: dict[str, Any] | None = None


prepare_types(_Piece)


class NodeEvents:
    """A node's stream, split into events. An incomplete last event is dropped."""

    def __init__(self, response: Response, hold: Callable[[int], None]) -> None:
        """Read from `response`. `hold` gets the most bytes buffered at a time, and may raise an UpdraftError."""
        self._response = response
        self._hold = hold
        self._buffered = 0
        self._parser = sse.EventParser()
        self._silent_s = 0.0
        self._timeout_s = response.timeouts.first_s

    @property
    def rest(self) -> bytes:
        """The bytes of an incomplete last event; the whole body if the answer is not an event stream."""
        return self._parser.rest

    async def read(self) -> list[bytes] | None:
        """Return the next events, without their blank lines; None at the end. Raises UpstreamFailure."""
        began = time.monotonic()
        if not (chunk := await self._response.read()):
            return None
        self._buffered += len(chunk)
        self._hold(self._buffered)
        try:
            events = self._parser.events(chunk)
        except sse.EventTooLongError as error:
            raise AnswerTooLargeError(str(error)) from error
        self._buffered = len(chunk) if events else self._buffered  # upper bound: the next event begins in this chunk
        self._silent_s += time.monotonic() - began
        if any(not event.startswith(b":") for event in events):
            self._silent_s, self._timeout_s = 0.0, self._response.timeouts.idle_s
        elif self._silent_s > _COMMENTS_FACTOR * self._timeout_s:
            raise UpstreamTimeout(f"the node sent only comments for {_COMMENTS_FACTOR * self._timeout_s:g} s")
        return events


def normalized_events(events: Iterable[bytes]) -> list[bytes]:
    """Return the events in OpenAI's format, each followed by its blank line."""
    spelled: list[bytes] = []
    for event in events:
        if event.startswith(b"data: {") and b"\n" not in event and _FINISH.search(event) is None:
            spelled.append(event + b"\n\n")  # fast path for nearly all events
        else:
            spelled += _in_one_spelling(event)
    return spelled


def _in_one_spelling(event: bytes) -> list[bytes]:
    data = sse.data_of(event)
    if not data:
        return [event + b"\n\n"]  # a keep-alive comment
    names_error = any(line.replace(b" ", b"") == b"event:error" for line in event.split(b"\n"))
    if names_error and not data.startswith(b'{"error"'):
        return [sse.event({"error": error_in(data, UpstreamError.status, "The node reported an error.")})]
    return [b"data: " + piece + b"\n\n" for piece in _split_final(data.replace(b"\n", b" "))]


def _split_final(data: bytes) -> list[bytes]:
    """Split an event with both text and a finish reason into two events, as OpenAI's servers send them."""
    if _FINISH.search(data) is None:
        return [data]
    try:
        event = msgspec.json.decode(data, type=dict[str, Any])
        msgspec.convert(event.get("choices"), list[_Piece])
    except UNREADABLE:
        return [data]
    text, finish = split_final_event(event)
    return [data] if text is None else [msgspec.json.encode(text), msgspec.json.encode(finish)]
