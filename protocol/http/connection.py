"""One connection: uvicorn's, with errors of OpenAI's shape for what is no HTTP, and an end to waiting for the rest."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import InvalidRequestError

REST_S = 30.0  # for the head of a request to be there, and between two pieces of its body


class Connection(H11Protocol):
    """The parser is the same wherever it runs: uvicorn would take another one, with other limits, where it is there."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and self._waiting is not None:
            return  # more of a head that began to come: no more time
        self._stop_waiting()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._wait()

    def on_response_complete(self) -> None:
        self._stop_waiting()  # uvicorn closes a connection on which nothing comes
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = InvalidRequestError(
                f"{msg} Its head, or a chunk of its body, is not HTTP/1.1.", code="invalid_http"
            )
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            events: list[Any] = [h11.Response(status_code=400, headers=headers, reason=b"Bad Request")]
            events += [h11.Data(data=msgspec.json.encode(error.to_body())), h11.EndOfMessage()]
            self.transport.write(b"".join(filter(None, map(self.conn.send, events))))
        self.transport.close()

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(REST_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
