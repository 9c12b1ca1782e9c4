"""A node's answer on its way to the client: whole, or event by event."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing

import msgspec

from ....protocol.errors import UpstreamError
from ....protocol.http import sse
from ....protocol.http.foreign import error_in
from ....protocol.safety.redaction import shown_url
from ..upstream.client import Response, UpstreamFailure, body_of
from .call import Call
from .stream import FINISH, events_of
from .usage import StreamMeter, whole_answer

WithoutKey = Callable[[bytes], bytes]


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


async def relay_stream(call: Call, response: Response, meter: StreamMeter, without_key: WithoutKey) -> None:
    """Whole events only, so that an error event can follow wherever the node breaks off."""
    ended = finished = False
    try:
        async with aclosing(events_of(response)) as events:
            async for event in events:
                finished = finished or FINISH.search(event) is not None
                shown = None if ended else meter.shown(event)
                if shown is None:
                    continue  # once ended: reading to the end keeps the connection usable
                if not call.answered:
                    await call.start(response, None)
                if event.startswith(b'data: {"error"'):  # the node lives, its answer does not
                    call.row.status = UpstreamError.status
                    ended, shown = True, without_key(shown)
                ended = ended or event.startswith(b"data: [DONE]")
                await call.emit(shown, more=not ended)
    finally:
        meter.settle()
    if finished and not ended:  # some leave the end mark out
        await call.emit(sse.DONE, more=False)
    elif not ended:
        raise UpstreamFailure("the stream ended without [DONE]")


def _odd_status(response: Response) -> str:
    """What to say of a status that is neither an answer's nor an error's. A redirect is named, and never followed."""
    location = dict(response.headers).get(b"location", b"").decode("latin-1")
    if not location or not 300 <= response.status < 400:
        return f"The node answered {response.status} instead of 200."
    target = shown_url(location)[:300]
    return f"The node answered {response.status}, a redirect to {target}: redirects are never followed."
