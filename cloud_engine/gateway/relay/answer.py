"""Relays a node's answer to the client: whole, or event by event."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ....protocol.errors import BudgetExceededError, UpstreamError
from ....protocol.http import sse
from ....protocol.http.lenient_json import error_in
from ....protocol.responses import Usage
from ..upstream.client import Response
from ..upstream.failures import AnswerFailure, UpstreamFailure
from .answer_checks import (
    EVENTS,
    WithoutKey,
    check_arguments,
    checked_whole,
    chunk_of,
    content_type,
    is_comment,
    reported_in,
    written_bytes,
)
from .call import MAX_COPIED, Call
from .passthrough import PassthroughUsage
from .stream import NodeEvents, normalized_events
from .usage import StreamMeter, meter_whole

_ERROR = re.compile(rb'"error"\s*:\s*+(?!null)')  # a field that is absent or null in good answers
_ENGINE_FAILED = re.compile(rb'"type":\s?"(?:engine_error|InternalServerError|server_error)"')
_CALLS = re.compile(rb'"tool_calls":\s?\[\s?\{')
_REFUSED = "The node refuses the gateway's key (status %d): the operator must correct the key."
_CUT = "the budget is used up: the answer is truncated"


async def relay_whole(call: Call, response: Response, without_key: WithoutKey) -> None:
    """Relay an answer that is not a stream, or an error in OpenAI's format. Raises AnswerFailure."""
    body, status, usage = await response.read_whole(call.hold), response.status, call.passthrough
    if status == 200:
        route = call.path.partition(b"?")[0].decode()
        if (checked := checked_whole(route, body, content_type(response), without_key)) is not body:
            call.copied, body = None, checked  # do not cache: the node may not have said how the answer finished
        meter_whole(body, call.row, call.size) if usage is None else usage.whole(body)
    elif status in (401, 403):
        raise AnswerFailure(f"status {status}", UpstreamError(_REFUSED % status))
    elif 400 <= status < 600:
        error = error_in(without_key(body), status, f"The node answered {status}")
        body = msgspec.json.encode({"error": error} if usage is None else usage.error_body(error))
    else:
        # Do not quote the target of a redirect, because it is internal.
        fault = "redirects are never followed" if 300 <= status < 400 else "an answer needs status 200"
        raise AnswerFailure(f"status {status}", UpstreamError(f"The node answered {status}: {fault}."))
    await call.start(response, body)
    await call.emit(body, more=False)


async def relay_stream(
    call: Call, response: Response, meter: StreamMeter, without_key: WithoutKey, *, may_break: bool
) -> None:
    """Relay a stream in whole events, so that another node's continuation or an error event can follow at any point.

    `may_break`: raise AnswerFailure if the engine reports a failure, since another node can continue.
    """
    if content_type(response) != EVENTS:  # correct a wrong or missing media type: clients may rely on the header
        headers = [header for header in response.headers if header[0] != b"content-type"]
        response = replace(response, headers=[*headers, (b"content-type", EVENTS)])
    events, reader = NodeEvents(response, call.hold_stream), _EventReader(call, meter, without_key, may_break)
    try:
        while (batch := await events.read()) is not None:
            shown = reader.read(normalized_events(batch))
            batch.clear()  # large events must not stay in memory while the client reads
            if shown:
                if reader.ended or call.begun.is_finished:
                    meter.settle()
                    call.book()
                if not call.answered:
                    await call.start(response, None)
                await call.emit(shown, more=not reader.ended)
            del shown
            if reader.failure is not None:
                raise reader.failure
            if not reader.ended and not await _is_covered(call, meter):
                call.copied = None  # do not cache: another request may have more budget
                await call.emit(call.begun.finish(call.size.answer.answers, "length", _CUT) + sse.DONE, more=False)
                return
    except UpstreamFailure:
        if not call.begun.is_finished:
            raise
    finally:
        meter.settle()
    if reader.ended:
        return
    if not call.begun.is_finished:
        raise AnswerFailure("the stream ended without [DONE]", reported_in(without_key(events.rest)))
    lacks_usage = call.usage_options.include_usage and not meter.is_reported and meter.running is not None
    usage = Usage.of(call.row.prompt_tokens, call.row.completion_tokens) if lacks_usage else None
    await call.emit(call.begun.ending(usage), more=False)


async def relay_passthrough(call: Call, usage: PassthroughUsage, response: Response, without_key: WithoutKey) -> None:
    """Relay an answer of a passthrough API unchanged: event by event if the node streams, else whole."""
    is_stream = content_type(response) == EVENTS or (call.stream and usage.is_text)
    if response.status == 200 and is_stream:
        await _relay_events(call, usage, response, without_key)
    else:
        await relay_whole(call, response, without_key)


async def _relay_events(call: Call, usage: PassthroughUsage, response: Response, without_key: WithoutKey) -> None:
    events = NodeEvents(response, call.hold_stream)
    try:
        while (batch := await events.read()) is not None:
            failure, shown = None, list[bytes]()
            for event in batch:
                failure = usage.read(event)
                if failure is not None and not (usage.ended and (shown or call.answered)):
                    # not ended: another node is tried, or the gateway ends the stream
                    usage.ended = usage.is_reported = False
                    break
                whole = usage.shown + b"\n\n" if usage.shown else b""
                shown.append(without_key(whole) if _ERROR.search(event) else whole)
                failure = None
            if usage.ended:
                usage.settle()
                call.book()
            batch.clear()  # large events must not stay in memory while the client reads
            if shown:
                if not call.answered:
                    await call.start(response, None)
                await call.emit(b"".join(shown), more=True)
                shown.clear()
            if failure is not None:
                raise failure
            if not usage.ended and not await _is_covered(call, usage):
                await call.emit(usage.error_event(BudgetExceededError(_CUT)), more=False)
                return
        if not usage.ended:
            raise AnswerFailure("the stream ended before the answer was whole", reported_in(without_key(events.rest)))
    except UpstreamFailure:
        if not usage.ended:
            raise
    finally:
        usage.settle()
    await call.emit(b"", more=False)


async def _is_covered(call: Call, meter: StreamMeter | PassthroughUsage) -> bool:
    """Reserve more tokens for a stream that has outgrown its reservation. Return False if the budget is used up."""
    reservation = None if call.account is None else call.account.reservation
    if reservation is None or not reservation.tokens:  # no budget depends on the answer's length
        return True
    return not meter.estimate(reservation.tokens).is_short or await reservation.top_up()


@dataclass(slots=True)
class _EventReader:
    """Converts a node's events into the client's. Drops events after the end, so that the connection stays reusable."""

    call: Call
    meter: StreamMeter
    without_key: WithoutKey
    may_break: bool  # whether an engine failure may be retried on another node
    ended: bool = False
    failure: AnswerFailure | None = None
    has_choices: bool = False
    has_calls: bool = False
    # Arguments of the function calls so far, by the indices of choice and call.
    arguments: dict[tuple[Any, Any], bytearray] = field(default_factory=dict[tuple[Any, Any], bytearray])

    def read(self, events: Iterable[bytes]) -> bytes:
        out: list[bytes] = []
        begun = self.call.begun
        for event in events:
            if self.ended:
                break
            try:
                event, text_bytes = self._checked(event)  # noqa: PLW2901
            except AnswerFailure as failure:
                if failure.event and not self._breaks(failure):  # the client's stream ends with this error
                    self.ended, self.call.row.status = True, UpstreamError.status
                    out.append(failure.event)
                else:
                    self.failure = failure
                break
            read = begun.read(event)
            if read is None or (shown := self.meter.shown(read, text_bytes) or begun.without_usage(read)) is None:
                continue
            self.ended = event.startswith(b"data: [DONE]")
            if self.ended and not begun.is_finished:
                self.call.copied = None  # do not cache: the node has not said how the answer finished
                out.append(begun.finish(self.call.size.answer.answers, "tool_calls" if self.has_calls else "stop"))
            out.append(shown)
        return b"".join(out)

    def _checked(self, event: bytes) -> tuple[bytes, int]:
        """Return the event to relay, and its bytes of text. Raises AnswerFailure for a malformed event, or if the event
        reports an error."""
        if event.startswith(b"data: {"):
            chunk, event = chunk_of(event)
            self.has_choices = self.has_choices or bool(chunk.choices)
            self.has_calls = self.has_calls or _CALLS.search(event) is not None
            for call, text in chunk.arguments:
                known = self.arguments.setdefault(call, bytearray())
                known += text.encode("utf-8", "surrogatepass")[: MAX_COPIED - len(known)]
            if chunk.is_error:
                raise self._reported(event)
            self.call.begun.is_finished = self.call.begun.is_finished or chunk.is_finished
            return event, written_bytes(event[6:])
        if event.startswith(b"data: [DONE]"):
            if not (self.has_choices or self.call.begun.is_finished):
                raise AnswerFailure("the stream ended without an answer")
            if not self.call.begun.is_finished:
                check_arguments(map(bytes, self.arguments.values()))
        elif sse.data_of(event) or not is_comment(event):
            raise AnswerFailure("the stream contains a line that is not part of an event")
        return event, 0

    def _reported(self, event: bytes) -> AnswerFailure:
        event = self.without_key(event)
        said = error_in(event[6:], UpstreamError.status, "The node reported an error.")
        if not event.startswith(b'data: {"error"'):
            event = sse.event({"error": said})
        error = UpstreamError(said["message"], param=said["param"], code=said["code"])
        return AnswerFailure("its engine failed", error, event)

    def _breaks(self, failure: AnswerFailure) -> bool:
        """Return whether to raise the error, not relay it: nothing was sent yet, or another node can continue."""
        if self.call.begun.is_finished or failure.is_final:
            return False
        return not self.call.answered or (self.may_break and _ENGINE_FAILED.search(failure.event) is not None)
