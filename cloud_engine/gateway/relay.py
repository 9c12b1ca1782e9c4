"""The hot path: one request to one node and its bytes back, with fail-over until the first byte and a row at the end.

A raw ASGI endpoint: what it relays it does not decode, except for the few fields that routing and metering need.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Any

import httpcore
import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ...protocol.decoding import refusal
from ...protocol.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    RequestCancelledError,
    RequestTimeoutError,
    UpdraftError,
    UpstreamError,
)
from ...protocol.http import sse
from ...protocol.http.foreign import apart, error_in
from ...protocol.http.forwarding import forwarded
from ...protocol.http.ids import new_id
from ...protocol.http.shell import ATTEMPT_HEADER, TENANT_HEADER, read_body, request_id, while_connected
from ...protocol.safety.names import MOST_NAME
from ...protocol.safety.redaction import shown_url
from .keys import KeyStore
from .metering import Meter, UsageRow
from .nodes import Node, NodeRegistry
from .upstream import Upstream, UpstreamFailure, body_of
from .usage import StreamMeter, UsageOptions, asking_for_usage, read_usage, whole_answer

_TRY_ELSEWHERE = frozenset({500, 502, 503, 504})
_ASK_S = 2.0
_RELAYED_HEADERS = frozenset(
    {b"content-type", b"retry-after", b"x-should-retry", b"cache-control", b"x-accel-buffering"}
)
_FINISH = re.compile(rb'"finish_reason":\s?"')
_log = logging.getLogger("updraft.gateway")


class _Peek(msgspec.Struct):
    """What the gateway must know of a request; everything else is the node's business."""

    model: Annotated[str, msgspec.Meta(max_length=MOST_NAME)]
    stream: bool | None = False
    stream_options: UsageOptions | None = None


class _Piece(msgspec.Struct):
    delta: dict[str, Any] | None = None


@dataclass(slots=True)
class _Call:
    """A request on its way. `path` has the query, `along` the headers that go with it.

    `asked`: what the client wants to see of the usage, if it is a stream.
    """

    id: str
    path: bytes
    along: list[tuple[bytes, bytes]]
    body: bytes
    model: str
    stream: bool
    asked: UsageOptions
    row: UsageRow
    started: float
    send: Send
    attempt: bytes = field(default_factory=lambda: new_id("try").encode())
    answered: bool = False
    tried: list[Node] = field(default_factory=list[Node])


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
        call = _call(request, await read_body(request), row, started, send)
        try:
            await self._serve_while_connected(call, receive)
        except (RequestCancelledError, RequestTimeoutError):
            await self._ask_what_it_cost(call)
            raise

    async def _serve_while_connected(self, call: _Call, receive: Receive) -> None:
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

    async def _answer(self, call: _Call) -> None:
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

    def _refusal(self, call: _Call) -> UpdraftError:
        refusal = self.registry.refusal(call.model)
        if call.tried and isinstance(refusal, ModelNotFoundError):
            return OverloadedError("Every node that has this model failed on this request: try again.")
        return refusal

    async def _relay(self, call: _Call, node: Node, *, is_last: bool) -> bool:
        """One attempt. False: the node answered that it cannot, and another may."""
        # Nodes keep the caches of different keys apart, without being told whose they are.
        tenant = blake2b(call.row.key_name.encode(), digest_size=16).hexdigest().encode()
        tells_usage = node.tells_usage
        body = asking_for_usage(call.body, running=tells_usage) if call.stream else call.body
        about = [(b"x-request-id", call.id.encode()), (TENANT_HEADER, tenant), (ATTEMPT_HEADER, call.attempt)]
        about += call.along
        async with AsyncExitStack() as stack:
            async with node.unless_it_hangs():  # until its first byte, after which another node could not take over
                sent = self.upstream.open("POST", node.target, call.path, body, about)
                response = await stack.enter_async_context(sent)
            if response.status in _TRY_ELSEWHERE and not is_last:
                return False
            call.row.status = response.status
            if call.stream and response.status == 200:
                await self._relay_stream(call, response, StreamMeter(call.row, call.asked, running=tells_usage))
            else:
                await self._relay_whole(call, response)
        return True

    async def _relay_whole(self, call: _Call, response: httpcore.Response) -> None:
        """A whole answer, or an error in OpenAI's shape, whatever shape the node gives it."""
        body, status = b"".join([chunk async for chunk in body_of(response)]), response.status
        if status == 200:
            body = whole_answer(body, call.row)
        elif 400 <= status < 600:
            body = self.upstream.without_key(call.tried[-1].target, body)
            body = msgspec.json.encode({"error": error_in(body, status, f"The node answered {status}")})
        else:
            raise UpstreamError(_odd_status(response))
        await _start(call, response, len(body))
        await _emit(call, body, more=False)

    async def _relay_stream(self, call: _Call, response: httpcore.Response, meter: StreamMeter) -> None:
        """Whole events only, so that an error event can follow wherever the node breaks off."""
        ended = finished = False
        try:
            async with aclosing(_events_of(response)) as events:
                async for event in events:
                    finished = finished or _FINISH.search(event) is not None
                    shown = None if ended else meter.shown(event)
                    if shown is None:
                        continue  # once ended: reading to the end keeps the connection usable
                    if not call.answered:
                        await _start(call, response, None)
                    if event.startswith(b'data: {"error"'):  # the node lives, its answer does not
                        call.row.status = UpstreamError.status
                        ended, shown = True, self.upstream.without_key(call.tried[-1].target, shown)
                    ended = ended or event.startswith(b"data: [DONE]")
                    await _emit(call, shown, more=not ended)
        finally:
            meter.settle()
        if finished and not ended:  # some leave the end mark out
            await _emit(call, sse.DONE, more=False)
        elif not ended:
            raise UpstreamFailure("the stream ended without [DONE]")

    async def _ask_what_it_cost(self, call: _Call) -> None:
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

    async def _end_broken_stream(self, call: _Call, failure: UpdraftError) -> None:
        await _emit(call, sse.event(failure.to_body()), more=False)


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


def _call(request: Request, body: bytes, row: UsageRow, started: float, send: Send) -> _Call:
    """Raises InvalidRequestError."""
    try:
        peek = msgspec.json.decode(body, type=_Peek)
    except msgspec.ValidationError as error:
        raise refusal(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}", code="invalid_json") from error
    row.model = peek.model
    asked, along = peek.stream_options or UsageOptions(), forwarded(request.headers, request.url.query)
    path, headers = (
        along.target(request.url.path).encode(),
        [(n.encode(), v.encode("latin-1")) for n, v in along.headers.items()],
    )
    return _Call(row.request_id, path, headers, body, peek.model, bool(peek.stream), asked, row, started, send)


async def _events_of(response: httpcore.Response) -> AsyncGenerator[bytes]:
    """The stream cut at event borders, in one spelling; what is left of a broken event is dropped."""
    parser = sse.EventParser()
    async with aclosing(body_of(response)) as chunks:
        async for chunk in chunks:
            try:
                events = parser.events(chunk)
            except sse.EventTooLongError as error:
                raise UpstreamFailure(str(error)) from error
            for event in events:
                data = sse.data_of(event).replace(b"\n", b" ")
                if data:
                    for piece in _finish_apart(data):
                        yield b"data: " + piece + b"\n\n"
                else:
                    yield event + b"\n\n"  # a sign of life


def _finish_apart(data: bytes) -> list[bytes]:
    """The last text and the finish as OpenAI sends them, one after the other: some servers send both at once."""
    if _FINISH.search(data) is None:
        return [data]
    try:
        event = msgspec.json.decode(data, type=dict[str, Any])
        msgspec.convert(event.get("choices"), list[_Piece])
    except msgspec.DecodeError:
        return [data]
    text, finish = apart(event)
    return [data] if text is None else [msgspec.json.encode(text), msgspec.json.encode(finish)]


def _odd_status(response: httpcore.Response) -> str:
    """What to say of a status that is neither an answer's nor an error's. A redirect is named, and never followed."""
    location = dict(response.headers).get(b"location", b"").decode("latin-1")
    if not location or not 300 <= response.status < 400:
        return f"The node answered {response.status} instead of 200."
    target = shown_url(location)[:300]
    return f"The node answered {response.status}, a redirect to {target}: redirects are never followed."


async def _start(call: _Call, response: httpcore.Response, length: int | None) -> None:
    headers = [(name.lower(), value) for name, value in response.headers if name.lower() in _RELAYED_HEADERS]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    call.row.ttft_ms = (time.perf_counter() - call.started) * 1e3
    call.answered = True
    await call.send({"type": "http.response.start", "status": response.status, "headers": headers})


async def _emit(call: _Call, data: bytes, *, more: bool) -> None:
    call.row.bytes += len(data)
    await call.send({"type": "http.response.body", "body": data, "more_body": more})


def _typed(error: TimeoutError | UpstreamFailure, timeout_s: float) -> UpdraftError:
    if isinstance(error, TimeoutError):
        return RequestTimeoutError(f"The request took longer than {timeout_s:g} s.")
    return UpstreamError(f"The node broke off in the middle of its answer ({error}): send the request again.")
