"""The hot path: one request to one node and its bytes back, with fail-over until the first byte and a row at the end.

A raw ASGI endpoint: what it relays it does not decode, except for the few fields that routing and metering need.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from hashlib import blake2b

import httpcore
import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ....protocol.errors import (
    ModelNotFoundError,
    OverloadedError,
    RequestCancelledError,
    RequestTimeoutError,
    UpdraftError,
    UpstreamError,
)
from ....protocol.http import sse
from ....protocol.http.foreign import error_in
from ....protocol.http.shell import ATTEMPT_HEADER, TENANT_HEADER, read_body, request_id, while_connected
from ....protocol.safety.redaction import shown_url
from ..access.keys import KeyStore
from ..balancing.nodes import Node, NodeRegistry
from ..ledger.metering import Meter, UsageRow
from ..upstream.client import Upstream, UpstreamFailure, body_of
from .call import Call, read_call
from .stream import FINISH, events_of
from .usage import StreamMeter, asking_for_usage, read_usage, whole_answer

_TRY_ELSEWHERE = frozenset({500, 502, 503, 504})
_ASK_S = 2.0
_log = logging.getLogger("updraft.gateway")


@dataclass(frozen=True, slots=True)
class Relay:
    """`POST /v1/chat/completions`, `/v1/completions` and `/v1/embeddings`. `timeout_s` bounds the whole;
    of a whole answer that takes longer, the node is asked what it has cost before the client is refused, for two more
    seconds at most.

    Every request that comes here leaves a usage row, refused ones too. One that is sent away because the gateway is
    shutting down does not come here: it is asked again elsewhere, and counted there.
    """

    registry: NodeRegistry
    upstream: Upstream
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
        request = Request(scope, receive)
        row.key_name = self.keys.name_of(request.headers.get("authorization", ""))
        call = read_call(request, await read_body(request), row, started, send)
        try:
            await self._serve_while_connected(call, receive)
        except (RequestCancelledError, RequestTimeoutError):
            await self._ask_what_it_cost(call)
            raise

    async def _serve_while_connected(self, call: Call, receive: Receive) -> None:
        async with while_connected(receive):
            try:
                async with asyncio.timeout(self.timeout_s):
                    await self._answer(call)
            except (TimeoutError, UpstreamFailure) as error:
                failure = _typed(error, self.timeout_s)
                call.row.status = failure.status
                if not call.answered:
                    raise failure from error
                await self._end_broken_stream(call, failure)

    async def _answer(self, call: Call) -> None:
        """Try nodes until one answers. Raises UpdraftError if none does, UpstreamFailure once bytes are out."""
        while True:
            node = self.registry.choose(call.model, call.tried)
            if node is None:
                raise self._refusal(call)
            call.row.node, call.row.retries = node.url, len(call.tried)
            call.tried.append(node)
            is_last = not self.registry.has_another(call.model, call.tried)
            try:
                with self.registry.load(node):
                    if await self._relay(call, node, is_last=is_last):
                        return
            except UpstreamFailure as failure:
                node.failed(str(failure))
                if call.answered:
                    raise

    def _refusal(self, call: Call) -> UpdraftError:
        refusal = self.registry.refusal(call.model)
        if call.tried and isinstance(refusal, ModelNotFoundError):
            return OverloadedError("Every node that has this model failed on this request: try again.")
        return refusal

    async def _relay(self, call: Call, node: Node, *, is_last: bool) -> bool:
        """One attempt. False: the node answered that it cannot, and another may."""
        # Nodes keep the caches of different keys apart, without being told whose they are.
        tenant = blake2b(call.row.key_name.encode(), digest_size=16).hexdigest().encode()
        tells_usage = node.tells_usage
        body = asking_for_usage(call.body, running=tells_usage) if call.stream else call.body
        about = [(b"x-request-id", call.id.encode()), (TENANT_HEADER, tenant), (ATTEMPT_HEADER, call.attempt)]
        about += call.forwarded
        async with AsyncExitStack() as stack:
            async with node.unless_it_hangs():  # until its first byte, after which another node could not take over
                sent = self.upstream.open("POST", node.target, call.path, body, about)
                response = await stack.enter_async_context(sent)
            if response.status in _TRY_ELSEWHERE and not is_last:
                return False
            call.row.status = response.status
            if call.stream and response.status == 200:
                await self._relay_stream(call, response, StreamMeter(call.row, call.usage_options, running=tells_usage))
            else:
                await self._relay_whole(call, response)
        return True

    async def _relay_whole(self, call: Call, response: httpcore.Response) -> None:
        """A whole answer, or an error in OpenAI's shape, whatever shape the node gives it."""
        body, status = b"".join([chunk async for chunk in body_of(response)]), response.status
        if status == 200:
            body = whole_answer(body, call.row)
        elif 400 <= status < 600:
            body = self.upstream.without_key(call.tried[-1].target, body)
            body = msgspec.json.encode({"error": error_in(body, status, f"The node answered {status}")})
        else:
            raise UpstreamError(_odd_status(response))
        await call.start(response, len(body))
        await call.emit(body, more=False)

    async def _relay_stream(self, call: Call, response: httpcore.Response, meter: StreamMeter) -> None:
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
                        ended, shown = True, self.upstream.without_key(call.tried[-1].target, shown)
                    ended = ended or event.startswith(b"data: [DONE]")
                    await call.emit(shown, more=not ended)
        finally:
            meter.settle()
        if finished and not ended:  # some leave the end mark out
            await call.emit(sse.DONE, more=False)
        elif not ended:
            raise UpstreamFailure("the stream ended without [DONE]")

    async def _ask_what_it_cost(self, call: Call) -> None:
        """Of a whole answer that nobody waits for any more, only the node knows: if it is one that can be asked."""
        if call.stream or not call.tried or not call.tried[-1].tells_usage:
            return
        try:
            async with asyncio.timeout(_ASK_S):
                status, body = await self.upstream.get(call.tried[-1].target, b"/spent/" + call.attempt)
        except (TimeoutError, UpstreamFailure) as error:
            _log.warning("Request %s is metered without its tokens: its node does not answer: %s", call.id, error)
        else:
            if status == 200:
                read_usage(b'{"usage":%b}' % body, call.row)

    async def _end_broken_stream(self, call: Call, failure: UpdraftError) -> None:
        await call.emit(sse.event(failure.to_body()), more=False)


class Counters:
    """For `/metrics`."""

    def __init__(self) -> None:
        self.by_status: dict[int, int] = {}
        self.retries = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0

    def count(self, row: UsageRow) -> None:
        self.by_status[row.status] = self.by_status.get(row.status, 0) + 1
        self.retries += row.retries
        self.prompt_tokens += row.prompt_tokens
        self.completion_tokens += row.completion_tokens


def _typed(error: TimeoutError | UpstreamFailure, timeout_s: float) -> UpdraftError:
    if isinstance(error, TimeoutError):
        return RequestTimeoutError(f"The request took longer than {timeout_s:g} s.")
    return UpstreamError(f"The node broke off in the middle of its answer ({error}): send the request again.")


def _odd_status(response: httpcore.Response) -> str:
    """What to say of a status that is neither an answer's nor an error's. A redirect is named, and never followed."""
    location = dict(response.headers).get(b"location", b"").decode("latin-1")
    if not location or not 300 <= response.status < 400:
        return f"The node answered {response.status} instead of 200."
    target = shown_url(location)[:300]
    return f"The node answered {response.status}, a redirect to {target}: redirects are never followed."
