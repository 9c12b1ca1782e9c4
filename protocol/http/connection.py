"""uvicorn's HTTP protocol, hardened: OpenAI-shaped 400 errors, read and write timeouts, bounded pipelining."""

from __future__ import annotations

import asyncio
import select
import socket
import sys
from http import HTTPStatus
from typing import Any, Literal

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..errors import InvalidRequestError, OverloadedError, UpdraftError
from .access import PEER, ConnectionLimits, PeerUser
from .app import CLIENT_GONE, LINGER_S

_CLOSE_CHECK_S = 0.1  # interval of checks for a closed connection while reading is paused
_MAX_HEAD = 2**16
_MAX_PART = 2**14  # maximum bytes parsed at a time
_MAX_AHEAD = 8  # maximum pipelined requests; parsing then pauses
_UPGRADES = (b"upgrade", b"http2-settings")
_REFUSAL = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
READ_TIMEOUT_S = 30.0  # timeout for the head of a request, and between two pieces of the body
WRITE_TIMEOUT_S = 60.0  # timeout for a client that does not read the response


class _FlowControl(FlowControl):
    """Flow control that keeps reading paused while `held`: part of the last read is not parsed yet."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class _HeadBuffer:
    """Transport that delays a response's head until the body or the next loop iteration, to send one packet."""

    def __init__(self, cycle: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle, self._transport, self._loop = cycle, cycle.transport, loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if not self._cycle.response_started:  # an interim "100 Continue"
            self._transport.write(data)
        elif self._head:
            self._send(self._head + data)
        else:
            self._head = data
            self._loop.call_soon(self._send, data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._send(self._head)
        self._transport.close()

    def _send(self, data: bytes) -> None:
        if self._cycle.transport is self and not self._transport.is_closing():
            self._transport.write(data)
        self._cycle.transport = self._transport  # later writes bypass this object


class Connection(HttpToolsProtocol):
    """Server side of an HTTP connection. Always parses with httptools; uvicorn might choose another parser."""

    _awaits: Literal["head", "body", "answer"] = "head"
    _silent_bytes = 0  # bytes received since the last complete head, piece of a body, or end of a body
    _plain_head = b""  # head of a request that offers a protocol upgrade, rebuilt without the offer
    _current: Any = None  # request being answered; uvicorn's `cycle` is the last request received
    _last_read = b""
    _parsed = 0  # parsed bytes of the last read
    _waits_for_capacity = False  # whether parsing pauses until a response finishes
    _waiting: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _close_check: asyncio.TimerHandle | None = None
    _refusal = b""  # error response to the last request, which ends parsing

    def __init__(self, *, limits: ConnectionLimits | None = None, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits or ConnectionLimits(sys.maxsize, sys.maxsize)

    def connection_made(self, transport: asyncio.Transport, below: asyncio.Transport | None = None) -> None:  # type: ignore[override]
        """Start serving the connection. `below`: the transport under TLS, if encrypted."""
        super().connection_made(transport)
        self._below = below or transport
        self.flow = self._flow = _FlowControl(transport)
        self.app_state = {**self.app_state, PEER: PeerUser(self.client, self.server)}
        if not self._limits.admit(self, self.client[0] if self.client else ""):
            self._refuse(OverloadedError("This server has reached its connection limit: try again later."), 503)
            return
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait()

    def close_now(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._last_read, self._parsed = data, 0
        self._parse_read()

    def _parse_read(self) -> None:
        """Parse the last read piecewise, because a read may hold thousands of requests and block other connections."""
        if self.transport.is_closing():
            return
        data, begin = self._last_read, self._parsed
        if (capacity := self._capacity) > 0:
            self._parsed = _end_of_heads(data, begin, capacity)
            self._read(data[begin : self._parsed])
        if self._parsed >= len(data):
            self._last_read, self._flow.held = b"", False
            if not self._is_full:
                self.flow.resume_reading()
                return
        else:
            self._flow.held = True
            self.flow.pause_reading()
            self._waits_for_capacity = self._capacity <= 0
            if not self._waits_for_capacity:
                self.loop.call_soon(self._parse_read)
                return
            self._stop_waiting()  # do not time out: the client has sent more already
        self._close_check = self._close_check or self.loop.call_later(_CLOSE_CHECK_S, self._check_for_close)

    def _read(self, data: bytes) -> None:
        self._silent_bytes += len(data)
        self._parse(data)
        if self._refusal or self.transport.get_protocol() is not self:
            self._stop_waiting()
            return
        if self._is_answering:
            self._limits.mark_busy(self)
        if self._awaits != "answer" and self._silent_bytes > _MAX_HEAD:
            self.send_400_response("The head or the trailer of the request is too long.")
        if self._waiting is not None and (self._awaits == "head" or not self._is_answering):
            return  # no new timeout: this is only a part of a head, or of a body that was already answered
        self._stop_waiting()
        if self._awaits != "answer":
            self._wait()

    def _parse(self, data: bytes) -> None:
        """Parse like uvicorn's `data_received`, but ignore a request's offer to upgrade to another protocol. Otherwise
        the parser would stop after the offer, and the body would be parsed as the next request."""
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserError:
                self.send_400_response("The request cannot be read.")
            except httptools.HttpParserUpgrade as upgrade:
                if self._plain_head:
                    data, self._plain_head = self._plain_head + data[upgrade.args[0] :], b""
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                    continue
                if self._is_answering or self.pipeline:
                    self._refuse(InvalidRequestError("Open a WebSocket on a new connection."), 400)
                else:
                    self.handle_websocket_upgrade()
            return

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._awaits = "head"

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._awaits == "head":  # ignore trailers after the body
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._awaits, self._silent_bytes = "body", 0
        method = self.parser.get_method()
        if not self.url.startswith(b"/") or b"#" in self.url or method == b"CONNECT":
            raise ValueError("the request target is not a path")  # else the parser would accept a whole URL
        if self.parser.should_upgrade() and not (method == b"GET" and self._should_upgrade()):
            lines = [name + b": " + value for name, value in self.headers if name not in _UPGRADES]
            version = b"HTTP/" + self.parser.get_http_version().encode()
            self._plain_head = b"\r\n".join([b" ".join([method, self.url, version]), *lines, b"\r\n"])
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._plain_head:
            return
        super().on_message_complete()
        if not self._is_answering:
            self._stop_waiting()  # the body of an answered request is complete
        self._awaits, self._silent_bytes = "answer" if self._is_answering else "head", 0

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._current = cycle
        cycle.scope[CLIENT_GONE] = self.loop.create_future()
        if cycle.scope["method"] != "HEAD":  # a HEAD response has no body to wait for
            cycle.transport = _HeadBuffer(cycle, self.loop)
        task = self.loop.create_task(cycle.run_asgi(app))
        self.tasks.add(task)
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if self._stall is None and self._below.get_write_buffer_size():
            self._watch_reader()

    def handle_websocket_upgrade(self) -> None:
        super().handle_websocket_upgrade()
        self._stop_watching()
        self._parsed = len(self._last_read)
        self._limits.mark_busy(self)
        protocol: Any = self.transport.get_protocol()
        lost = protocol.connection_lost

        def forget(exc: Exception | None) -> None:
            self._limits.forget(self)
            lost(exc)

        protocol.connection_lost = forget  # the WebSocket counts as a connection until it closes

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self._stop_waiting()  # uvicorn has its own keep-alive timeout
            self._limits.mark_idle(self)
            if self._awaits == "body":  # the request was answered before the body was complete
                self._waiting = self.loop.call_later(LINGER_S, self.transport.close)
            else:
                self._awaits = "head"
        super().on_response_complete()
        if self._refusal and not self._is_answering:
            self._end(self._refusal)
        elif self._waits_for_capacity:
            self._waits_for_capacity = False
            self.loop.call_soon(self._parse_read)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def eof_received(self) -> None:
        self._disconnect_current()  # uvicorn closes the connection after pending writes, as None is returned

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        self._limits.forget(self)
        self._disconnect_current()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        message = f"{msg} The head, or a chunk of the body, is not valid HTTP/1.1."
        self._refuse(InvalidRequestError(message, code="invalid_http"), 400)

    @property
    def _capacity(self) -> int:
        """Number of further pipelined requests that may be queued."""
        if self._refusal or (self.pipeline and sum(len(cycle.body) for cycle, _ in self.pipeline) > HIGH_WATER_LIMIT):
            return 0
        return _MAX_AHEAD - len(self.pipeline)

    @property
    def _is_full(self) -> bool:
        """Return whether to pause reading until the app consumes queued requests or body data."""
        cycle: Any = self.cycle  # None before the first request
        has_body = cycle is not None and not cycle.response_complete and len(cycle.body) > HIGH_WATER_LIMIT
        return self._capacity <= 0 or (has_body and self._awaits == "body")

    @property
    def _is_answering(self) -> bool:
        return self._current is not None and not self._current.response_complete

    def _refuse(self, error: UpdraftError, status: int) -> None:
        """Send `error` after the answers to earlier requests, then close. Later requests get no response."""
        body = msgspec.json.encode(error.to_body())
        self._refusal = _REFUSAL % (status, HTTPStatus(status).phrase.encode(), len(body), body)
        is_body = self._awaits == "body" and getattr(self.cycle, "scope", None) is self.scope
        if is_body and self.pipeline:
            self.pipeline.popleft()
        elif is_body or not self._is_answering:
            self._end(b"" if is_body and self._current.response_started else self._refusal)
        self._awaits = "head"

    def _end(self, refusal: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(refusal)
            self._disconnect_current()
            self.transport.close()

    def _disconnect_current(self) -> None:
        """Mark the current request as disconnected and drop queued requests."""
        self.pipeline.clear()
        if self._is_answering and not self._current.disconnected:
            self._current.disconnected = True
            self._current.message_event.set()
            self._current.scope[CLIENT_GONE].set_result(None)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(READ_TIMEOUT_S, self._on_silence)

    def _on_silence(self) -> None:
        """Close the connection on a read timeout. Wait again if reading is paused, since data may be unread."""
        if self.flow.read_paused:
            self._wait()
        else:
            self.transport.close()

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _check_for_close(self) -> None:
        """Check whether the client has disconnected while reading is paused. Only Linux can report that."""
        self._close_check = None
        if self.transport.is_closing() or not self.flow.read_paused or not hasattr(select, "POLLRDHUP"):
            return
        poll = select.poll()
        poll.register(self._below.get_extra_info("socket"), select.POLLRDHUP)
        if poll.poll(0):
            self._disconnect_current()
            self._below.close()
        else:
            self._close_check = self.loop.call_later(_CLOSE_CHECK_S, self._check_for_close)

    def _watch_reader(self, before: tuple[int, Any] | None = None) -> None:
        """Abort the connection if the client does not read the response. Closing it gracefully would wait forever."""
        self._stop_watching()
        unread = self._below.get_write_buffer_size(), self._current
        if unread == before:
            self._below.abort()
        elif unread[0]:
            self._stall = self.loop.call_later(WRITE_TIMEOUT_S, self._watch_reader, unread)

    def _stop_watching(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def _end_of_heads(data: bytes, at: int, most: int) -> int:
    """Return the end of the next part to parse, with at most `most` heads. Empty lines in a body may count as heads."""
    end = min(at + _MAX_PART, len(data))
    for _ in range(most):
        if data.find(b"\r", at, end) < 0:  # fast path for most bodies
            return end
        at = data.find(b"\n\r\n", at, end) + 3
        if at < 3:
            return end
    return at
