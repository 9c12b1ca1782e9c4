"""The entry point of relayed routes: the steps of one request in order.

A raw ASGI endpoint that decodes only the few fields needed for routing and metering.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ....accounting.token_estimate import LONGEST_ANSWER
from ....protocol.errors import (
    OverloadedError,
    RateLimitError,
    RequestCancelledError,
    RequestTimeoutError,
    UpdraftError,
    UpstreamError,
)
from ....protocol.http import sse
from ....protocol.http.app import cancel_on_disconnect, read_body, request_id
from ....protocol.http.body_memory import BODY_OWNER, HOLD_MORE
from ....protocol.telemetry.tracing import Span, Tracer, usage
from ..access.keys import KeyStore
from ..balancing.request_queue import QueuePlace
from ..ledger.metering import UsageRow
from ..limits.accounting import Accounting
from ..limits.limiter import limit_hit
from ..upstream.failures import AnswerFailure, AnswerTooLargeError, UnreachableError, UpstreamFailure, UpstreamTimeout
from .call import Call, read_call
from .counters import Counters
from .dispatch import Dispatch
from .response_cache import ResponseCache
from .usage import read_usage

_USAGE_QUERY_S = 2.0
_AWAITED_USAGE_QUERY_S = 0.2  # seconds; short, because the client waits for its error response meanwhile
_MAX_TOKENS_PER_S = 5_000  # assumed maximum for one answer; several times the speed of the fastest models
_log = logging.getLogger("updraft.gateway")


@dataclass(frozen=True, slots=True)
class Relay:
    """The endpoint of a relayed route such as `POST /v1/chat/completions`. Each admitted request gets a usage row."""

    dispatch: Dispatch
    keys: KeyStore
    accounting: Accounting
    counters: Counters
    cache: ResponseCache
    tracer: Tracer = field(default_factory=lambda: Tracer("updraft-gateway"))
    # Deadlines of the answers in flight.
    _deadlines: set[asyncio.Timeout] = field(default_factory=set[asyncio.Timeout])

    async def end_answers(self) -> None:
        """End the answers in flight with an error, at the end of the drain."""
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(0)

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
            about = {"gen_ai.request.model": row.model, "http.response.status_code": row.status}
            tokens = usage(row.prompt_tokens, row.completion_tokens)
            span.end({**about, **tokens, "updraft.tier": row.tier}, error="" if row.status < 400 else str(row.status))
            self.counters.count(row, is_served=self.dispatch.registry.serves(row.model))

    async def _serve(self, request: Request, send: Send, row: UsageRow, span: Span, started: float) -> None:
        """Run the steps of a request in order. Raises an UpdraftError to refuse it."""
        headers = request.headers  # includes `x-api-key`, which Anthropic's clients send
        principal = self.keys.principal(headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}")
        weight = self.accounting.limiter.limits_file.weights.get(principal.tenant, 1.0)
        place = QueuePlace(principal.priority, principal.tenant, weight)
        self.dispatch.registry.queue.check(place)  # refuse early, before the body is read and without a usage row
        row.key_name, row.key_id, row.tenant = principal.name, principal.key_id, principal.tenant
        row.tier = principal.priority
        principal.require("inference")
        deadline = asyncio.get_running_loop().time() + self.dispatch.timeouts.timeout_s
        request.scope["state"][BODY_OWNER] = principal.tenant
        # Entered before the body is read, so that a caller at its concurrency limit is refused without an upload.
        async with self.accounting.in_flight(principal) as entered:
            body = await read_body(request, self.dispatch.timeouts.timeout_s)
            call = read_call(request, body, row, started, send)
            principal.check_model(call.model)
            call.place, call.span, call.hold = place, span, request.scope["state"][HOLD_MORE]
            answer = replace(call.size.answer, context=self.dispatch.registry.context_length(call.model))
            call.size = replace(call.size, answer=answer)
            async with self.accounting.admitted(principal, row, call.size, entered) as account:
                call.account, call.limit_headers = account, account.reservation.headers()
                if account.cap is not None:
                    call.limit(account.cap)
                await self._answer(call, request, deadline)
        if call.stream and row.status == 200:
            self.counters.streamed(row, time.perf_counter() - started)

    async def _answer(self, call: Call, request: Request, deadline: float) -> None:
        """Answer until the client disconnects or the deadline passes."""
        try:
            with cancel_on_disconnect(request):
                await self._answer_in_time(call, deadline)
        except (RequestCancelledError, RequestTimeoutError, RateLimitError) as error:  # RateLimitError: memory is full
            is_left = isinstance(error, RequestCancelledError)
            most_s = _USAGE_QUERY_S if is_left else _AWAITED_USAGE_QUERY_S
            is_known = call.stream or await self._query_usage(call, most_s)
            if is_left and not is_known and call.account is not None:
                call.account.book_longest(_most_written(call))
            raise

    async def _answer_in_time(self, call: Call, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                self._deadlines.add(timeout)
                try:
                    await self.cache.answer(call, self.dispatch.answer)
                finally:
                    self._deadlines.discard(timeout)
        except (TimeoutError, UpstreamFailure, OverloadedError, RateLimitError) as error:
            if isinstance(error, UpdraftError) and not call.answered:
                raise
            failure = _typed(error, self.dispatch.timeouts.timeout_s)
            if isinstance(error, TimeoutError) and asyncio.get_running_loop().time() < deadline:
                failure = OverloadedError("This server is shutting down: send the request again.", code="draining")
            call.row.status = failure.status
            has_length = any(name == b"content-length" for name, _ in call.answer_headers)
            if not call.answered or has_length:  # a body of known length has no place for an error event
                raise failure from error
            event = error.event if isinstance(error, AnswerFailure) and error.event else sse.event(failure.to_body())
            if call.passthrough is not None:
                event = call.passthrough.error_event(failure)
            await call.emit(event, more=False)

    async def _query_usage(self, call: Call, most_s: float) -> bool:
        """Query the tokens used by an interrupted answer (not a stream). Return False if the node does not know."""
        if not call.tried or not call.tried[-1].tells_tokens:
            return False
        try:
            async with asyncio.timeout(most_s):
                status, body = await self.dispatch.upstream.get(call.tried[-1].target, b"/spent/" + call.attempt)
        except (TimeoutError, UpstreamFailure) as error:
            _log.warning("The tokens of request %s are unknown: its node does not report them: %s", call.id, error)
            return False
        return status == 200 and read_usage(b'{"usage":%b}' % body, call.row)


def _most_written(call: Call) -> int:
    """Return an upper bound on the tokens generated for an answer (not a stream) whose client has just left."""
    stops = call.tried and all(node.tells_usage for node in call.tried)  # these nodes stop when the gateway disconnects
    seconds = time.perf_counter() - call.started
    return call.size.answer.answers * (int(seconds * _MAX_TOKENS_PER_S) if stops else LONGEST_ANSWER)


def _typed(error: TimeoutError | UpstreamFailure | UpdraftError, whole_s: float) -> UpdraftError:
    if isinstance(error, UpdraftError):
        return error
    if isinstance(error, TimeoutError):
        return RequestTimeoutError(f"The request exceeded the time limit of {whole_s:g} s.")
    if isinstance(error, UpstreamTimeout):
        return RequestTimeoutError(f"The node timed out ({error}): send the request again.")
    if isinstance(error, AnswerFailure):
        return error.error or UpstreamError(f"The node's answer is invalid ({error}): send the request again.")
    if isinstance(error, AnswerTooLargeError):
        return UpstreamError(f"The gateway cannot relay the answer: {error}. Request a shorter one.")
    why = "the node is unreachable" if isinstance(error, UnreachableError) else error  # hide the node's address
    return UpstreamError(f"The node failed during its answer ({why}): send the request again.")
