"""The hot path: the steps of one request, each in a module of its own.

A raw ASGI endpoint: what it relays it does not decode, except for the few fields that routing and metering need.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ....protocol.errors import (
    OverloadedError,
    RequestCancelledError,
    RequestTimeoutError,
    UpdraftError,
    UpstreamError,
)
from ....protocol.http import sse
from ....protocol.http.body_memory import BODY_OWNER
from ....protocol.http.shell import read_body, request_id, while_connected
from ....protocol.telemetry.tracing import Span, Tracer, usage
from ..access.keys import KeyStore
from ..balancing.waiting import QueuePlace
from ..ledger.metering import UsageRow
from ..limits.accounting import Accounting
from ..limits.limiter import limit_hit
from ..upstream.failures import AnswerFailure, AnswerTooLargeError, UpstreamFailure, UpstreamTimeout
from .call import Call, read_call
from .counters import Counters
from .dispatch import Dispatch
from .response_cache import ResponseCache
from .usage import read_usage

_ASK_S = 2.0
_ASK_AWAITED_S = 0.2  # while the client waits for its error
_log = logging.getLogger("updraft.gateway")


@dataclass(frozen=True, slots=True)
class Relay:
    """A relayed route, such as `POST /v1/chat/completions`. Every request that is read leaves a usage row."""

    dispatch: Dispatch
    keys: KeyStore
    accounting: Accounting
    counters: Counters
    cache: ResponseCache
    tracer: Tracer = field(default_factory=lambda: Tracer("updraft-gateway"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        row, request = UsageRow(request_id=request_id(scope)), Request(scope, receive)
        span = self.tracer.request(scope["path"], request.headers)
        try:
            await self._serve(request, send, row, span, started)
        except UpdraftError as error:
            row.status = error.status
            self.counters.refused(error, limit_hit(error))
            raise
        except BaseException:
            row.status = 500
            raise
        finally:
            row.latency_ms = (time.perf_counter() - started) * 1e3
            if row.key_name:
                self.accounting.ledger.settle(row)
            _end(span, row)
            self.counters.count(row, is_served=self.dispatch.registry.serves(row.model))

    async def _serve(self, request: Request, send: Send, row: UsageRow, span: Span, started: float) -> None:
        """The steps of a request, in order. Each raises an UpdraftError to refuse it."""
        principal = self.keys.principal(_authorization(request))
        place = QueuePlace(principal.priority, principal.tenant)
        self.dispatch.registry.check_line(place)  # under overload most end here, unread and without a row
        row.key_name, row.key_id, row.tenant = principal.name, principal.key_id, principal.tenant
        row.tier = principal.priority
        principal.require("inference")
        deadline = asyncio.get_running_loop().time() + self.dispatch.timeouts.whole_s
        request.scope["state"][BODY_OWNER] = principal.tenant
        # Before the body: a caller that may have no more requests in flight need not send it.
        async with self.accounting.entered(principal) as entered:
            body = await read_body(request, self.dispatch.timeouts.whole_s)
            call = read_call(request, body, row, started, send)
            principal.check_model(call.model)
            call.place, call.span = place, span
            async with self.accounting.admitted(principal, row, call.size, entered) as account:
                call.account, call.limit_headers = account, account.reservation.headers()
                if account.cap is not None:
                    call.limit(account.cap)
                await self._answer(call, request, deadline)
        if call.stream and row.status == 200:
            self.counters.streamed(row, time.perf_counter() - started)

    async def _answer(self, call: Call, request: Request, deadline: float) -> None:
        """The answer goes out while the client is there and the time lasts."""
        try:
            with while_connected(request):
                await self._answer_in_time(call, deadline)
        except (RequestCancelledError, RequestTimeoutError) as error:
            is_awaited = isinstance(error, RequestTimeoutError)
            await self._ask_what_it_cost(call, _ASK_AWAITED_S if is_awaited else _ASK_S)
            raise

    async def _answer_in_time(self, call: Call, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self.cache.answer(call, self.dispatch.answer)
        except (TimeoutError, UpstreamFailure, OverloadedError) as error:
            if isinstance(error, OverloadedError) and not call.answered:
                raise
            failure = _typed(error, self.dispatch.timeouts.whole_s)
            call.row.status = failure.status
            if not call.answered:
                raise failure from error
            event = error.event if isinstance(error, AnswerFailure) and error.event else sse.event(failure.to_body())
            if call.passage is not None:
                event = call.passage.error_event(failure)
            await call.emit(event, more=False)

    async def _ask_what_it_cost(self, call: Call, most_s: float) -> None:
        """Of a whole answer that broke off, only the node knows: if it is one that can be asked."""
        if call.stream or not call.tried or not call.tried[-1].tells_usage:
            return
        try:
            async with asyncio.timeout(most_s):
                status, body = await self.dispatch.upstream.get(call.tried[-1].target, b"/spent/" + call.attempt)
        except (TimeoutError, UpstreamFailure) as error:
            _log.warning("Request %s is metered without its tokens: its node does not answer: %s", call.id, error)
        else:
            if status == 200:
                read_usage(b'{"usage":%b}' % body, call.row)


def _authorization(request: Request) -> str:
    """Anthropic's clients send the key in a header of its own."""
    if found := request.headers.get("authorization"):
        return found
    key = request.headers.get("x-api-key", "")
    return f"Bearer {key}" if key else ""


def _end(span: Span, row: UsageRow) -> None:
    """Name the span's request by what it came to."""
    about = {"gen_ai.request.model": row.model, "http.response.status_code": row.status, "updraft.tier": row.tier}
    span.end(
        {**about, **usage(row.prompt_tokens, row.completion_tokens)}, error="" if row.status < 400 else str(row.status)
    )


def _typed(error: TimeoutError | UpstreamFailure | OverloadedError, whole_s: float) -> UpdraftError:
    if isinstance(error, OverloadedError):
        return error
    if isinstance(error, TimeoutError):
        return RequestTimeoutError(f"The request took longer than {whole_s:g} s.")
    if isinstance(error, UpstreamTimeout):
        return RequestTimeoutError(f"The answer stopped ({error}): send the request again.")
    if isinstance(error, AnswerFailure):
        return error.error or UpstreamError(f"The node's answer is unusable ({error}): send the request again.")
    if isinstance(error, AnswerTooLargeError):
        return UpstreamError(f"The gateway does not relay it: {error}. Ask for less.")
    return UpstreamError(f"The node broke off in the middle of its answer ({error}): send the request again.")
