"""ASGI app shared by daemon, gateway and node: OpenAI-shaped errors, body limits, fast reaction to disconnects.

The shell is plain ASGI, because middleware that wraps request and response objects would hide client disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import string
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, replace
from random import getrandbits  # faster than `secrets`; request ids are not secret
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import (
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    OverloadedError,
    RequestCancelledError,
    RequestTimeoutError,
    RequestTooLargeError,
    UpdraftError,
)
from . import sse
from .access import Access
from .body_memory import BODY_OWNER, HOLD_MORE, SMALL_BYTES, BodyMemory, HeldMemory
from .wire import WireRequest, WireResponse, close_body, error_body

#: Header from the gateway to its nodes: an opaque tenant id, the same for all requests of one API key.
TENANT_HEADER = b"x-updraft-tenant"
#: Header from the gateway to its nodes: the tenant's share with `--scheduling-policy fair`, relative to other tenants.
WEIGHT_HEADER = b"x-updraft-tenant-weight"
TenantWeight = Annotated[float, msgspec.Meta(gt=0, le=1000)]

#: Scope key of a future, set by `Connection`, that completes if the client disconnects before the response is done.
CLIENT_GONE = "updraft.gone"

#: Header from the gateway to a node: id of the attempt, whose cost so far can be read at `/spent/{attempt}`.
ATTEMPT_HEADER = b"x-updraft-attempt"

LINGER_S = 2.0  # time to read the rest of a body after an early response
BODY_S = 120.0  # timeout for a whole body, which holds memory and counts as a request in flight
_HEAD_ONLY = "updraft.head_only"  # scope key of a HEAD request, which is routed as GET but gets no response body
_MAX_HEADERS = 256
_SINGLE = (b"host", b"transfer-encoding")
_VERSIONS = ("1.1", "1.0", "2", "3")
# Paths whose routes only `updraft serve` has completely, as the errors of other servers say.
_ROUTER_ROUTES = ("/v1/files", "/v1/batches", "/v1/responses", "/v1/chat/completions")
_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_.:")
_log = logging.getLogger("updraft.http")


def create_app(
    title: str,
    *,
    access: Access | None = None,
    max_body_bytes: int = 8 * 2**20,
    max_upload_bytes: Mapping[str, int] | None = None,
    lifespan: Callable[[Any], Any] | None = None,
) -> HttpApp:
    """Create an app that reports every failure as an OpenAI error and sets `x-request-id` on every response.

    Routes may raise any UpdraftError. The shell handles unknown routes, wrong methods, bodies above `max_body_bytes`
    and unexpected exceptions (logged, but sent without a traceback). Requests refused by `access` never reach a route.
    `max_upload_bytes`: limits by path for paths that accept larger bodies. `lifespan` is Starlette's.
    """
    access = access or Access()
    app = HttpApp(title=title, lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.state.traffic = Traffic()
    app.state.max_body_bytes = max_body_bytes
    limits = BodyLimits(max_body_bytes, max_upload_bytes or {}, BodyMemory())
    app.layers.append(Middleware(_OuterMiddleware, access=access, limits=limits, traffic=app.state.traffic))
    if access.allowed_origins:
        every: dict[str, Any] = {name: ["*"] for name in ("allow_methods", "allow_headers", "expose_headers")}
        every["allow_private_network"] = True  # browsers ask before a page may use a server on loopback
        app.layers.append(Middleware(CORSMiddleware, allow_origin_regex=access.origin_pattern, **every))
    app.user_middleware += app.layers
    return app


class HttpApp(FastAPI):
    """FastAPI app with a fast path: requests to `add_post` endpoints skip FastAPI's routing, not the middleware."""

    def __init__(self, **fastapis: Any) -> None:
        super().__init__(**fastapis)
        self.layers: list[Middleware] = []
        self._posts: dict[str, ASGIApp] = {}

    def add_post(self, path: str, endpoint: ASGIApp) -> None:
        """Add an ASGI endpoint for POST requests to `path`. FastAPI answers requests with other methods."""
        self.router.routes.append(Route(path, endpoint, methods=["POST"]))
        for layer in reversed(self.layers):
            endpoint = layer.cls(endpoint, *layer.args, **layer.kwargs)
        self._posts[path] = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._posts.get(scope["path"]) if is_post else None
        await (super().__call__ if endpoint is None else endpoint)(scope, receive, send)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Size limits of request bodies, in bytes."""

    # Limit per body, except uploads.
    usual: int
    # Limit per body for upload paths, whose bodies are streamed and not held in memory.
    uploads: Mapping[str, int]
    # Limit for all bodies and whole answers held in memory.
    memory: BodyMemory


@dataclass(eq=False)
class Traffic:
    """Requests in flight of an app. While `draining`, new requests get 503 and requests in flight continue."""

    in_flight: int = 0
    draining: bool = False
    # Called when the drain starts.
    at_drain: Callable[[], Coroutine[Any, Any, None]] | None = None
    # Called when the drain ends, to fail the remaining requests.
    at_deadline: Callable[[], Awaitable[None]] | None = None


def request_id(scope: Scope) -> str:
    """Return the request's id: the caller's `x-request-id` if valid, else a generated id."""
    return scope["state"]["request_id"]


async def read_body(request: Request, most_s: float = BODY_S) -> bytes:
    """Read the whole body, within the shorter of `BODY_S` and `most_s` seconds.

    Raises RequestTooLargeError, RequestTimeoutError, RequestCancelledError, and the errors of `BodyMemory.take`.
    """
    try:
        async with asyncio.timeout(min(most_s, BODY_S)):
            return b"".join([piece async for piece in _pieces(request)])
    except TimeoutError as error:
        raise RequestTimeoutError("The request body did not arrive in time: send it faster.") from error


async def read_wire_request(request: Request) -> WireRequest:
    """Read the whole request. Raises RequestTooLargeError as soon as the body exceeds the app's limit."""
    return _wire_request(request, await read_body(request))


def upload_wire_request(request: Request) -> WireRequest:
    """Return the request with a streamed body. The stream raises RequestTooLargeError and RequestCancelledError."""
    return replace(_wire_request(request), upload=_pieces(request))


def _wire_request(request: Request, body: bytes = b"") -> WireRequest:
    """Build the request from the ASGI scope. In `request.url`, a decoded `?` in the path would start the query."""
    query = request.scope["query_string"].decode("latin-1")
    return WireRequest(request.method, request.scope["path"], dict(request.headers), body, query=query)


async def _pieces(request: Request) -> AsyncGenerator[bytes]:
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect as error:
        raise RequestCancelledError("The client closed the connection while sending.") from error


def send(response: WireResponse, request: Request, heartbeat_s: float = 0.0) -> Response:
    """Convert `response` for Starlette. A streamed body is closed when it ends or fails, or the client disconnects.
    `heartbeat_s`: seconds of silence after which a keep-alive comment is sent; 0 sends none."""
    if isinstance(response.body, bytes):
        return Response(response.body, response.status, dict(response.headers))
    route = request.method + " " + request.scope["path"]
    return _StreamedResponse(response, route, request_id(request.scope), heartbeat_s)


def error_response(error: UpdraftError, path: str = "") -> Response:
    """Build an error response in the format that clients of `path` expect."""
    return send_json(error_body(error.to_body()["error"], path), error.status, error.headers())


def send_json(payload: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(payload), status, headers, media_type="application/json")


@contextlib.contextmanager
def cancel_on_disconnect(request: Request) -> Generator[None]:
    """Raise RequestCancelledError in the block if the client disconnects. Read the body first, or it is lost."""
    task = asyncio.current_task()
    assert task is not None, "a request is answered in a task"
    own: asyncio.Future[None] | None = request.scope.get(CLIENT_GONE)
    left = own or asyncio.create_task(_wait_for_disconnect(request.receive))
    gone = over = False

    def leave(_: asyncio.Future[None]) -> None:
        nonlocal gone
        if not over:
            gone = True
            task.cancel()

    left.add_done_callback(leave)
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:  # otherwise other code cancelled the task too: propagate
            raise RequestCancelledError("The client closed the connection.") from None
        raise
    finally:
        over = True
        left.remove_done_callback(leave)
        if own is None:
            left.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    """Wait for the client to disconnect, on ASGI servers that do not set `CLIENT_GONE`."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _StreamedResponse(Response):
    def __init__(self, response: WireResponse, route: str, request_id: str, heartbeat_s: float) -> None:
        assert not isinstance(response.body, bytes)
        self.status_code = response.status
        self.background = None
        self.init_headers(dict(response.headers))
        self._chunks = response.body
        self._route = route
        self._request_id = request_id
        self._heartbeat_s = heartbeat_s
        self._last = 0.0  # time of the last chunk, on the event loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, heart = asyncio.get_running_loop(), None
        try:
            with cancel_on_disconnect(Request(scope, receive)):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                if scope.get(_HEAD_ONLY):
                    await send({"type": "http.response.body", "body": b""})
                    return
                heart = asyncio.create_task(self._beat(send)) if self._heartbeat_s else None
                async for chunk in self._chunks:
                    self._last = loop.time()
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if heart is not None:
                    heart.cancel()
                await send({"type": "http.response.body", "body": b""})
        except RequestCancelledError:
            _log.info("%s %s: the client disconnected during the stream", self._route, self._request_id)
        finally:
            if heart is not None:
                heart.cancel()
            await close_body(self._chunks)

    async def _beat(self, send: Send) -> None:
        """Send keep-alive comments. A comment may go between any two chunks, since chunks hold whole events."""
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        while True:
            silent_s = loop.time() - self._last
            if silent_s >= self._heartbeat_s:
                self._last, silent_s = loop.time(), 0.0
                await send({"type": "http.response.body", "body": sse.KEEP_ALIVE, "more_body": True})
            await asyncio.sleep(self._heartbeat_s - silent_s)

    def init_headers(self, headers: Any = None) -> None:
        """Set headers like Starlette, without content-length: the length of a stream is unknown."""
        self.raw_headers = [(name.lower().encode("latin-1"), str(v).encode("latin-1")) for name, v in headers.items()]


class _OuterMiddleware:
    """Outermost ASGI layer: checks framing, access and draining, and converts exceptions to error responses."""

    def __init__(self, app: ASGIApp, access: Access, limits: BodyLimits, traffic: Traffic) -> None:
        self._app = app
        self._access = access
        self._limits = limits
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", _HEAD_ONLY: True}
        exchange = _Exchange(scope, receive, send, self._limits)
        try:
            self._check(scope, ", or use another server")
        except UpdraftError as error:
            await exchange.fail(error)
            return
        self._traffic.in_flight += 1
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except RequestCancelledError:
            _log.info("%s: the client disconnected", exchange.request_id)
        except UpdraftError as error:
            await exchange.fail(error)
        except Exception as error:  # noqa: BLE001 - a server outlives any request
            _log.exception("%s %s failed, request %s", scope["method"], scope["path"], exchange.request_id)
            failure = UpdraftError(f"Internal server error ({type(error).__name__}). Request id: {exchange.request_id}")
            await exchange.fail(failure)
        finally:
            self._traffic.in_flight -= 1
            exchange.release()

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Apply the checks of HTTP requests to a WebSocket. A refused handshake gets an HTTP error."""
        try:
            self._check(scope, " later")
            await self._app(scope, receive, send)
        except UpdraftError as error:
            response = error_response(error)
            start = {"status": response.status_code, "headers": response.raw_headers}
            await send({"type": "websocket.http.response.start", **start})
            await send({"type": "websocket.http.response.body", "body": response.body})

    def _check(self, scope: Scope, when: str) -> None:
        """Check framing, access and draining. Raises UpdraftError. `when`: the end of the advice to try again."""
        _check_framing(scope)
        self._access.check(scope)
        if self._traffic.draining:
            raise OverloadedError(f"This server is shutting down: try again{when}.", code="draining")


class _FramingError(InvalidRequestError):
    """A request whose end is ambiguous, so the connection is closed."""

    default_code = "invalid_http"


def _check_framing(scope: Scope) -> None:
    """Refuse ambiguous framing (request smuggling), too many headers, and a compressed body (decompression bombs)."""
    headers = scope["headers"]
    sent = dict(headers)
    coding, version = sent.get(b"transfer-encoding"), scope.get("http_version", "1.1")
    if coding is not None and (b"content-length" in sent or version == "1.0"):
        raise _FramingError("Transfer-Encoding cannot be combined with Content-Length or HTTP/1.0.")
    if coding is not None and coding.lower() != b"chunked":
        raise _FramingError("The only supported Transfer-Encoding is chunked.")
    names = [name for name, _ in headers]
    if max(map(names.count, _SINGLE)) > 1 or version not in _VERSIONS:
        raise _FramingError("A request must have one Host, at most one Transfer-Encoding, and a known HTTP version.")
    if len(headers) > _MAX_HEADERS:
        raise _FramingError(f"The request has more than {_MAX_HEADERS} headers: send fewer.", code="too_many_headers")
    if any(name == b"content-encoding" and value.lower() not in (b"", b"identity") for name, value in headers):
        raise _FramingError("Content-Encoding is not supported: send the body uncompressed.")


class _Exchange:
    """Request and response pair: assigns the request id, enforces body limits, and sends error responses."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: BodyLimits) -> None:
        headers = dict(scope["headers"])
        self._path = scope["path"]
        self._max_body_bytes = limits.uploads.get(self._path, limits.usual)
        self._memory = BodyMemory(sys.maxsize, sys.maxsize) if self._path in limits.uploads else limits.memory
        self._held = HeldMemory(headers.get(TENANT_HEADER, b"").decode("latin-1"))
        self.request_id = _usable_id(headers.get(b"x-request-id", b"")) or f"req-{getrandbits(96):024x}"
        self._state = scope.setdefault("state", {})
        self._state["request_id"] = self.request_id
        self._state[HOLD_MORE] = self._hold
        self._announced = int(headers.get(b"content-length") or 0)  # the parser has checked that these are digits
        self._receive = receive
        self._send = send
        self._received = 0
        self._is_arriving = True
        self._started = False
        self._complete = False

    async def receive(self) -> Message:
        """Receive a message. Raises RequestTooLargeError as soon as the announced or received body is too large.

        Reserves memory before reading an announced body, with the errors of `BodyMemory.take`. Raises OverloadedError
        if the body arrives too slowly and `BodyMemory` gives its memory to other requests.
        """
        if self._announced > self._max_body_bytes:
            raise self._too_large()
        self._hold(self._announced - self._held.size)
        try:
            async with self._waiting(1 if self._is_arriving else sys.maxsize):
                message = await self._receive()
        except TimeoutError as error:
            raise OverloadedError("The body arrived too slowly while memory was short: send fewer requests.") from error
        if message["type"] == "http.disconnect" and self._complete:
            await asyncio.Event().wait()  # a disconnect after the response must not cancel the app's final steps
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            if self._received > self._max_body_bytes:
                raise self._too_large()
            self._hold(self._received - self._held.size)
            self._is_arriving = message.get("more_body", False)
        return message

    def _waiting(self, least: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Allow `BodyMemory` to end a wait for the client, if the request holds at least `least` bytes."""
        return self._memory.waiting_for_client(self._held) if self._held.size >= least else contextlib.nullcontext()

    def _hold(self, more: int) -> None:
        if not self._held.size:
            self._held.owner = self._state.get(BODY_OWNER, self._held.owner)
        if more > 0:
            self._memory.take(self._held, more)

    def release(self) -> None:
        """Release the request's memory at its end."""
        self._memory.give_back(self._held)

    async def send(self, message: Message) -> None:
        """Send a message. A large body is sent piecewise: the request lasts until its client has read the answer.
        Raises RequestCancelledError if a slow client loses the memory of its request."""
        body, has_more = message.get("body", b""), message.get("more_body", False)
        if len(body) > SMALL_BYTES:
            for at in range(0, len(body), SMALL_BYTES):
                end = at + SMALL_BYTES
                await self.send({**message, "body": body[at:end], "more_body": has_more or end < len(body)})
            return
        if message["type"] == "http.response.start":
            self._started = True
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
        self._complete = message["type"] == "http.response.body" and not has_more
        try:
            async with self._waiting(SMALL_BYTES + 1):
                await self._send(message)
        except TimeoutError as error:
            raise RequestCancelledError("The client read the response too slowly while memory was short.") from error

    async def fail(self, error: UpdraftError) -> None:
        """Send `error` as the response. If a response has started, only log the error."""
        if self._started:
            _log.error("Request %s failed after the response had started: %s", self.request_id, error.message)
            return
        response = error_response(error, self._path)
        closes = isinstance(error, _FramingError | RequestTooLargeError)
        headers = [*response.raw_headers, (b"connection", b"close")] if closes else response.raw_headers
        await self.send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await self.send({"type": "http.response.body", "body": response.body, "more_body": closes})
        if closes:  # read the rest of the body: closing a socket with unread bytes may destroy the response
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while (await self._receive()).get("more_body"):
                        pass
            await self.send({"type": "http.response.body", "body": b""})

    def _too_large(self) -> RequestTooLargeError:
        return RequestTooLargeError(f"The request body is larger than {self._max_body_bytes} bytes: send less.")


def _usable_id(raw: bytes) -> str:
    """Return the caller's request id if it is short and safe in logs and headers, else an empty string."""
    text = raw.decode("latin-1")
    return text if len(text) <= 128 and _ID_CHARACTERS.issuperset(text) else ""


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(_as_updraft_error(request, error), request.scope["path"])
    response.headers.update(error.headers or {})
    return response


def _as_updraft_error(request: Request, error: HTTPException) -> UpdraftError:
    path: str = request.scope["path"]
    route, kept = f"{request.method} {path}", path.startswith(_ROUTER_ROUTES)
    elsewhere = " Only `updraft serve` provides files, batches and stored responses." if kept else ""
    if error.status_code == 404:
        return NotFoundError(f"{route} is not a route of this server.{elsewhere}")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "none")
        return MethodNotAllowedError(f"{route} is not allowed; allowed: {allowed}.{elsewhere}")
    return InvalidRequestError(str(error.detail))
