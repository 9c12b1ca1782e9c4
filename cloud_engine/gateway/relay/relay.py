"""The hot path: the steps of one request, each in a module of its own.

A raw ASGI endpoint: what it relays it does not decode, except for the few fields that routing and metering need.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ....protocol.errors import RequestCancelledError, RequestTimeoutError, UpdraftError, UpstreamError
from ....protocol.http import sse
from ....protocol.http.shell import read_body, request_id, while_connected
from ..access.keys import KeyStore
from ..ledger.metering import Meter, UsageRow
from ..upstream.client import UpstreamFailure
from .call import Call, read_call
from .counters import Counters
from .dispatch import Dispatch
from .usage import read_usage

_ASK_S = 2.0
_log = logging.getLogger("updraft.gateway")


@dataclass(frozen=True, slots=True)
class Relay:
    """A relayed route, as `POST /v1/chat/completions`. `timeout_s` bounds the whole;
    of a whole answer that takes longer, the node is asked what it has cost before the client is refused, for two more
    seconds at most.

    Every request that comes here leaves a usage row, refused ones too. One that is sent away because the gateway is
    shutting down does not come here: it is asked again elsewhere, and counted there.
    """

    dispatch: Dispatch
    keys: KeyStore
    meter: Meter
    counters: Counters
    timeout_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        row = UsageRow(request_id(scope))
        try:
            await self._serve(scope, receive, send, row, started)
        except UpdraftError as error:
            row.status = error.status
            raise
        except BaseException:
            row.status = 500
            raise
        finally:
            row.latency_ms = (time.perf_counter() - started) * 1e3
            self.meter.record(row)
            self.counters.count(row)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, row: UsageRow, started: float) -> None:
        """The steps of a request, in order. Each raises an UpdraftError to refuse it."""
        request = Request(scope, receive)
        row.key_name = self.keys.name_of(request.headers.get("authorization", ""))
        call = read_call(request, await read_body(request), row, started, send)
        # What limits a key, and what records an intent, stands here: before any node is asked.
        await self._answer(call, receive)

    async def _answer(self, call: Call, receive: Receive) -> None:
        """The answer goes out while the client is there and the time lasts."""
        try:
            async with while_connected(receive):
                await self._answer_in_time(call)
        except (RequestCancelledError, RequestTimeoutError):
            await self._ask_what_it_cost(call)
            raise

    async def _answer_in_time(self, call: Call) -> None:
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.dispatch.answer(call)
        except (TimeoutError, UpstreamFailure) as error:
            failure = _typed(error, self.timeout_s)
            call.row.status = failure.status
            if not call.answered:
                raise failure from error
            await call.emit(sse.event(failure.to_body()), more=False)

    async def _ask_what_it_cost(self, call: Call) -> None:
        """Of a whole answer that nobody waits for any more, only the node knows: if it is one that can be asked."""
        if call.stream or not call.tried or not call.tried[-1].tells_usage:
            return
        try:
            async with asyncio.timeout(_ASK_S):
                status, body = await self.dispatch.upstream.get(call.tried[-1].target, b"/spent/" + call.attempt)
        except (TimeoutError, UpstreamFailure) as error:
            _log.warning("Request %s is metered without its tokens: its node does not answer: %s", call.id, error)
        else:
            if status == 200:
                read_usage(b'{"usage":%b}' % body, call.row)


def _typed(error: TimeoutError | UpstreamFailure, timeout_s: float) -> UpdraftError:
    if isinstance(error, TimeoutError):
        return RequestTimeoutError(f"The request took longer than {timeout_s:g} s.")
    return UpstreamError(f"The node broke off in the middle of its answer ({error}): send the request again.")
