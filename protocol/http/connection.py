"""One connection: uvicorn's, with errors of OpenAI's shape for what is no HTTP, and an end to waiting for the rest."""

from __future__ import annotations

import asyncio
import socket
import sys
from http import HTTPStatus
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import InvalidRequestError, OverloadedError, UpdraftError
from .connection_limits import ConnectionLimits

_LINGER_S = 2.0
_MAX_HEAD = 2**16
_MAX_EVENTS = 256
REST_S = 30.0  # for the head of a request to be there, and between two pieces of its body
STALL_S = 60.0  # in which a client reads nothing of what waits for it


class _Framing(h11.Connection):
    """h11, with a short way for the pieces of a stream, and one write for the head and the body of a whole answer.

    It tells of so many events at a time: a read may hold 40,000 chunks of a byte, which take more than a second.
    """

    _is_chunked = False
    _events_left = _MAX_EVENTS
    _head = b""  # of a whole answer, whose body comes next

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if type(event) is h11.Data and self._is_chunked and event.data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        output = super().send(event)
        if type(event) is not h11.Response or output is None:
            head, self._head = self._head, b""
            return head + output if head and output is not None else output
        self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in output.lower()
        if self._is_chunked or b"\r\ncontent-length: " not in output.lower():
            return output
        self._head = output
        return b""

    def begin_turn(self) -> None:
        self._events_left = _MAX_EVENTS

    @property
    def has_more(self) -> bool:
        return self._events_left <= 0

    def next_event(self) -> Any:
        if self._events_left <= 0:
            return h11.NEED_DATA
        self._events_left -= 1
        return super().next_event()


class _Flow(FlowControl):
    """Reads nothing while events of the last read are left."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class Connection(H11Protocol):
    """The parser is the same wherever it runs: uvicorn would take another one, with other limits, where it is there."""

    _waiting: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def __init__(self, *, limits: ConnectionLimits | None = None, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.conn = _Framing(h11.SERVER, _MAX_HEAD)
        self._limits = limits or ConnectionLimits(sys.maxsize, sys.maxsize)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)
        if not self._limits.admit(self, self.client[0] if self.client else ""):
            self._refuse(OverloadedError("This server has all the connections that it can hold: try again."), 503)
            return
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait()

    def close_now(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self.conn.begin_turn()
        super().data_received(data)
        self._after_events()

    def _after_events(self) -> None:
        self._take_turns()
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            self._limits.works(self)
        if self.conn.their_state is h11.IDLE and self._waiting is not None:
            return  # more of a head that began to come: no more time
        self._stop_waiting()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._wait()

    def _take_turns(self) -> None:
        """Leave what events there still are to the next turn of the event loop."""
        if self._flow.held == self.conn.has_more:
            return
        self._flow.held = self.conn.has_more
        if self._flow.held:
            self.flow.pause_reading()
            self.loop.call_soon(self._go_on)
        else:
            self.flow.resume_reading()

    def _go_on(self) -> None:
        if self.transport.is_closing():
            return
        self.conn.begin_turn()
        self.handle_events()
        if self._flow.held and self.conn.has_more:
            self.loop.call_soon(self._go_on)
        self._after_events()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        super().handle_websocket_upgrade(event)
        self._limits.works(self)
        protocol: Any = self.transport.get_protocol()
        lost = protocol.connection_lost

        def forget(exc: Exception | None) -> None:
            self._limits.forget(self)
            lost(exc)

        protocol.connection_lost = forget  # it has taken over, and counts until it ends

    def on_response_complete(self) -> None:
        self._stop_waiting()  # uvicorn closes a connection on which nothing comes
        self._limits.rests(self)
        if self.conn.their_state is h11.SEND_BODY:  # of a request that is answered already
            self._waiting = self.loop.call_later(_LINGER_S, self.transport.close)
        super().on_response_complete()
        self._take_turns()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size() + 1)

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        self._limits.forget(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        message = f"{msg} Its head, or a chunk of its body, is not HTTP/1.1."
        self._refuse(InvalidRequestError(message, code="invalid_http"), 400)

    def _refuse(self, error: UpdraftError, status: int) -> None:
        """Ends the connection. No request on it is answered any more."""
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            events: list[Any] = [
                h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
            ]
            events += [h11.Data(data=msgspec.json.encode(error.to_body())), h11.EndOfMessage()]
            self.transport.write(b"".join(filter(None, map(self.conn.send, events))))
        self.transport.close()

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(REST_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _watch_reader(self, unread: int) -> None:
        """Whoever reads nothing for long is cut off: a mere close would wait for that without end."""
        left = self.transport.get_write_buffer_size()
        if left >= unread:
            self.transport.abort()
        else:
            self._stall = self.loop.call_later(STALL_S, self._watch_reader, left)

    def _stop_watching(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
