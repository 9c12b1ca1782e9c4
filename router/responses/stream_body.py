"""Body of a streamed answer, which calls its end callback exactly once."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress

from ...protocol.errors import EngineError
from ...protocol.http import sse
from ..cascade.cascade import Cascade, CloudStreamReply, LiveReply, LocalReply, Reply
from . import completion as answer
from . import streaming as streams

log = logging.getLogger("updraft.router")


class StreamBody(AsyncIterator[bytes]):
    """Streamed body that calls `end` exactly once, with a status: when exhausted, failed, or closed by its consumer."""

    def __init__(self, events: AsyncGenerator[bytes], end: Callable[[int], Awaitable[None]]) -> None:
        self._events = events
        self._end = end
        self._ended = self._is_held = False

    def hold_end(self) -> Callable[[int], Awaitable[None]]:
        """Return `end`, for a translator to call after its last event. This body then calls `end` only on failure."""
        self._is_held = True
        return self._finish

    async def __anext__(self) -> bytes:
        if self._ended:
            raise StopAsyncIteration
        try:
            event = await anext(self._events)
        except StopAsyncIteration:
            await self._succeed()
            raise
        except streams.StreamError as error:
            await self._finish(error.status)
            return error.payload
        except BaseException as error:
            await self._finish(500 if isinstance(error, Exception) else 499)
            if not isinstance(error, Exception):
                raise
            log.exception("stream failed")
            return sse.event(answer.internal_error().to_body())
        if event.endswith(sse.DONE):  # end now, because the client may stop reading after the end mark
            await self._succeed()
        return event

    async def aclose(self) -> None:
        """Stop the answer. Idempotent. A consumer must first cancel its pending `__anext__`."""
        await self._finish(499)

    async def _succeed(self) -> None:
        if not self._is_held:
            await self._finish(200)

    async def _finish(self, status: int) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            with suppress(RuntimeError):  # raised if the consumer's `__anext__` is still pending
                await self._events.aclose()
        finally:
            await self._end(status)


def events_of(cascade: Cascade, reply: Reply) -> AsyncGenerator[bytes]:
    if isinstance(reply, LocalReply):
        return streams.replay(cascade, reply.answer)
    if isinstance(reply, CloudStreamReply):
        reasoning = streams.cloud_reasoning(cascade)
        include_usage = cascade.job.include_usage
        return streams.relay(cascade.record, reply.stream, include_usage=include_usage, reasoning=reasoning)
    if isinstance(reply, LiveReply):
        return (streams.live if cascade.ruling.open else streams.unjudged)(cascade, reply.run)
    raise EngineError("The cascade returned a whole answer instead of a stream.")
