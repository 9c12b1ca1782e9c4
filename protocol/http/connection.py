"""One connection: uvicorn's, with errors of OpenAI's shape for what is no HTTP, and an end to waiting for the rest."""

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
from .access import PEER, PeerUser
from .connection_limits import ConnectionLimits
from .shell import GONE, LINGER_S

_LOOK_S = 0.1  # between two looks for the end of a connection that is not read
_MAX_HEAD = 2**16
_MAX_PART = 2**14  # bytes of a read, at a time
_MAX_AHEAD = 8  # requests that wait behind one that is being answered, before no more is parsed
_UPGRADES = (b"upgrade", b"http2-settings")
_REFUSAL = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
REST_S = 30.0  # for the head of a request to be there, and between two pieces of its body
STALL_S = 60.0  # in which a client reads nothing of what waits for it


class _Flow(FlowControl):
    """Reads nothing while a part of the last read is left."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class _Head:
    """A transport that holds a response's head back until its body, or the loop's next turn: one packet, not two."""

    def __init__(self, cycle: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle, self._transport, self._loop = cycle, cycle.transport, loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if not self._cycle.response_started:  # 100 Continue
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
        self._cycle.transport = self._transport  # all else goes there directly


class Connection(HttpToolsProtocol):
    """The parser is the same wherever it runs: uvicorn would take another one where this one is missing."""

    _awaits: Literal["head", "body", "answer"] = "head"
    _silent_bytes = 0  # since the last head, piece of a body, or end of it
    _plain_head = b""  # of a request that offers another protocol, without that
    _current: Any = None  # the request that is being answered; uvicorn's `cycle` is the last one that came
    _last_read = b""
    _parsed = 0  # bytes of the last read
    _waits_for_room = False  # what is left of the last read, until something is answered
    _waiting: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _look: asyncio.TimerHandle | None = None
    _refusal = b""  # of the last request: nothing behind it is parsed

    def __init__(self, *, limits: ConnectionLimits | None = None, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits or ConnectionLimits(sys.maxsize, sys.maxsize)

    def connection_made(self, transport: asyncio.Transport, below: asyncio.Transport | None = None) -> None:  # type: ignore[override]
        """`below`: what TLS is on top of, where it is."""
        super().connection_made(transport)
        self._below = below or transport
        self.flow = self._flow = _Flow(transport)
        self.app_state = {**self.app_state, PEER: PeerUser(self.client, self.server)}
        if not self._limits.admit(self, self.client[0] if self.client else ""):
            self._refuse(OverloadedError("This server has all the connections that it can hold: try again."), 503)
            return
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait()

    def close_now(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._last_read, self._parsed = data, 0
        self._go_on()

    def _go_on(self) -> None:
        """A read may hold 40,000 chunks of a byte, or 9,000 requests: others get their turn in between."""
        if self.transport.is_closing():
            return
        data, begin = self._last_read, self._parsed
        if (room := self._room) > 0:
            self._parsed = _end_of_heads(data, begin, room)
            self._read(data[begin : self._parsed])
        if self._parsed >= len(data):
            self._last_read, self._flow.held = b"", False
            if not self._is_full:
                self.flow.resume_reading()
                return
        else:
            self._flow.held = True
            self.flow.pause_reading()
            self._waits_for_room = self._room <= 0
            if not self._waits_for_room:
                self.loop.call_soon(self._go_on)
                return
            self._stop_waiting()  # for the client: it has sent more already
        self._look = self._look or self.loop.call_later(_LOOK_S, self._look_for_end)

    def _read(self, data: bytes) -> None:
        self._silent_bytes += len(data)
        self._parse(data)
        if self._refusal or self.transport.get_protocol() is not self:
            self._stop_waiting()
            return
        if self._is_answering:
            self._limits.works(self)
        if self._awaits != "answer" and self._silent_bytes > _MAX_HEAD:
            self.send_400_response("The head of the request, or what is behind its body, is too long.")
        if self._waiting is not None and (self._awaits == "head" or not self._is_answering):
            return  # more of a head that began to come, or of a body that is answered already: no more time
        self._stop_waiting()
        if self._awaits != "answer":
            self._wait()

    def _parse(self, data: bytes) -> None:
        """As uvicorn's `data_received`, but that a request is read without its offer of another protocol.

        The parser takes what follows such a head for the other protocol's: a body would be the next request.
        """
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
                    self._refuse(InvalidRequestError("A WebSocket has a connection of its own."), 400)
                else:
                    self.handle_websocket_upgrade()
            return

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._awaits = "head"

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._awaits == "head":  # not a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._awaits, self._silent_bytes = "body", 0
        method = self.parser.get_method()
        if not self.url.startswith(b"/") or b"#" in self.url or method == b"CONNECT":
            raise ValueError("a target that is no path")  # the parser would look for one in it
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
            self._stop_waiting()  # for the rest of a body that was answered already
        self._awaits, self._silent_bytes = "answer" if self._is_answering else "head", 0

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._current = cycle
        cycle.scope[GONE] = self.loop.create_future()
        if cycle.scope["method"] != "HEAD":  # no body comes
            cycle.transport = _Head(cycle, self.loop)
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
        self._limits.works(self)
        protocol: Any = self.transport.get_protocol()
        lost = protocol.connection_lost

        def forget(exc: Exception | None) -> None:
            self._limits.forget(self)
            lost(exc)

        protocol.connection_lost = forget  # it has taken over, and counts until it ends

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self._stop_waiting()  # uvicorn closes a connection on which nothing comes
            self._limits.rests(self)
            if self._awaits == "body":  # of a request that is answered already
                self._waiting = self.loop.call_later(LINGER_S, self.transport.close)
            else:
                self._awaits = "head"
        super().on_response_complete()
        if self._refusal and not self._is_answering:
            self._end(self._refusal)
        elif self._waits_for_room:
            self._waits_for_room = False
            self.loop.call_soon(self._go_on)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def eof_received(self) -> None:
        self._leave_current()  # the connection is closed only when all is sent

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        self._limits.forget(self)
        self._leave_current()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        message = f"{msg} Its head, or a chunk of its body, is not HTTP/1.1."
        self._refuse(InvalidRequestError(message, code="invalid_http"), 400)

    @property
    def _room(self) -> int:
        """For so many more requests that wait behind one that is being answered."""
        if self._refusal or (self.pipeline and sum(len(cycle.body) for cycle, _ in self.pipeline) > HIGH_WATER_LIMIT):
            return 0
        return _MAX_AHEAD - len(self.pipeline)

    @property
    def _is_full(self) -> bool:
        """Whether enough was read, until the app takes it."""
        cycle: Any = self.cycle  # None before the first request
        has_body = cycle is not None and not cycle.response_complete and len(cycle.body) > HIGH_WATER_LIMIT
        return self._room <= 0 or (has_body and self._awaits == "body")

    @property
    def _is_answering(self) -> bool:
        return self._current is not None and not self._current.response_complete

    def _refuse(self, error: UpdraftError, status: int) -> None:
        """Ends the connection once the requests before this one are answered. None behind it is."""
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
            self._leave_current()
            self.transport.close()

    def _leave_current(self) -> None:
        """Nobody waits for its answer any more, nor for those of requests behind it."""
        self.pipeline.clear()
        if self._is_answering and not self._current.disconnected:
            self._current.disconnected = True
            self._current.message_event.set()
            self._current.scope[GONE].set_result(None)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(REST_S, self._on_silence)

    def _on_silence(self) -> None:
        """Of a client that is read: what another one sends is not looked at before the answer to what came earlier."""
        if self.flow.read_paused:
            self._wait()
        else:
            self.transport.close()

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _look_for_end(self) -> None:
        """Linux tells that a client has left behind all that its kernel holds unread of it."""
        self._look = None
        if self.transport.is_closing() or not self.flow.read_paused or not hasattr(select, "POLLRDHUP"):
            return
        poll = select.poll()
        poll.register(self._below.get_extra_info("socket"), select.POLLRDHUP)
        if poll.poll(0):
            self._leave_current()
            self._below.close()
        else:
            self._look = self.loop.call_later(_LOOK_S, self._look_for_end)

    def _watch_reader(self, before: tuple[int, Any] | None = None) -> None:
        """Whoever reads nothing for long is cut off: a mere close would wait for that without end."""
        self._stop_watching()
        unread = self._below.get_write_buffer_size(), self._current
        if unread == before:
            self._below.abort()
        elif unread[0]:
            self._stall = self.loop.call_later(STALL_S, self._watch_reader, unread)

    def _stop_watching(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def _end_of_heads(data: bytes, at: int, most: int) -> int:
    """Where a part of a read ends, or `most` heads in it have. An empty line in a body may count as a head."""
    end = min(at + _MAX_PART, len(data))
    for _ in range(most):
        if data.find(b"\r", at, end) < 0:  # quicker, and true of most bodies
            return end
        at = data.find(b"\n\r\n", at, end) + 3
        if at < 3:
            return end
    return at
