"""A node's answer on its way to the client: whole, or event by event."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import aclosing

import msgspec

from ....protocol.errors import UpstreamError
from ....protocol.http.foreign import error_in
from ....protocol.responses import Usage
from ....protocol.safety.redaction import shown_url
from ..upstream.client import Response, UpstreamFailure, body_of
from .call import Call
from .stream import FINISH, events_of
from .usage import StreamMeter, whole_answer

_ENGINE_FAILED = re.compile(rb'"type":\s?"(?:engine_error|InternalServerError|server_error)"')
WithoutKey = Callable[[bytes], bytes]


class EngineFailure(UpstreamFailure):
    """The engine behind a node failed in mid-stream, and the node said so in `event`."""

    def __init__(self, event: bytes) -> None:
        super().__init__("its engine failed")
        self.event = event


async def relay_whole(call: Call, response: Response, without_key: WithoutKey) -> None:
    """A whole answer, or an error in OpenAI's shape, whatever shape the node gives it."""
    body, status = b"".join([chunk async for chunk in body_of(response)]), response.status
    if status == 200:
        body = whole_answer(body, call.row)
    elif 400 <= status < 600:
        body = msgspec.json.encode({"error": error_in(without_key(body), status, f"The node answered {status}")})
    else:
        raise UpstreamError(_odd_status(response))
    await call.start(response, len(body))
    await call.emit(body, more=False)


async def relay_stream(
    call: Call, response: Response, meter: StreamMeter, without_key: WithoutKey, *, may_break: bool
) -> None:
    """Whole events only, so that another node, or an error event, can follow wherever this one breaks off.

    `may_break`: whether an engine that reports its failure raises EngineFailure, since another node could go on.
    """
    begun, ended = call.begun, False
    try:
        async with aclosing(events_of(response)) as events:
            async for event in events:
                begun.is_finished = begun.is_finished or FINISH.search(event) is not None
                read = None if ended else begun.read(event)
                shown = None if read is None else meter.shown(read)
                if shown is None:
                    continue  # once ended: reading to the end keeps the connection usable
                if not call.answered:
                    await call.start(response, None)
                if event.startswith(b'data: {"error"'):  # the node lives, its answer does not
                    if may_break and not begun.is_finished and _ENGINE_FAILED.search(event):
                        raise EngineFailure(without_key(shown))
                    call.row.status = UpstreamError.status
                    ended, shown = True, without_key(shown)
                ended = ended or event.startswith(b"data: [DONE]")
                await call.emit(shown, more=not ended)
    except UpstreamFailure:
        if not begun.is_finished:
            raise
    finally:
        meter.settle()
    if ended:
        return
    if not begun.is_finished:
        raise UpstreamFailure("the stream ended without [DONE]")
    wants_usage = call.usage_options.include_usage and call.row.prompt_tokens and not meter.is_reported
    await call.emit(begun.ending(_usage(call) if wants_usage else None), more=False)


def _usage(call: Call) -> Usage:
    return Usage.of(call.row.prompt_tokens, call.row.completion_tokens)


def _odd_status(response: Response) -> str:
    """What to say of a status that is neither an answer's nor an error's. A redirect is named, and never followed."""
    location = dict(response.headers).get(b"location", b"").decode("latin-1")
    if not location or not 300 <= response.status < 400:
        return f"The node answered {response.status} instead of 200."
    target = shown_url(location)[:300]
    return f"The node answered {response.status}, a redirect to {target}: redirects are never followed."
