"""Head and body leave in one packet, and never later than the loop's next iteration."""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from raw_http import exchanged, post
from serving import serving
from starlette.types import Receive, Scope, Send
from updraft.protocol.http.connection import Connection


class Recorder:
    """A transport, and what was written to it."""

    def __init__(self, transport: Any, writes: list[bytes]) -> None:
        self._transport, self._writes = transport, writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._writes.append(data)
        self._transport.write(data)


def recording(writes: list[bytes]) -> type[Connection]:
    class Recording(Connection):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.transport = Recorder(transport, writes)  # type: ignore[assignment]

    return Recording


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/read":
        await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-head", b"1")]})
    if scope["path"] == "/late":
        await receive()  # the client sends its body once it has the head
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    if scope["path"] == "/cut":
        raise ZeroDivisionError("in the stream")
    await send({"type": "http.response.body", "body": b"two"})


@pytest.mark.parametrize("path", ["/", "/cut"])
def test_a_head_goes_out_with_the_first_of_its_body(path: str) -> None:
    writes: list[bytes] = []
    with serving(app, protocol=recording(writes)) as url:
        answer = exchanged(url, post(path, b""))
    assert answer == b"".join(writes)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert [write.count(b"\r\n3\r\n") for write in writes] == ([1, 0] if path == "/" else [1])
    assert answer.endswith(b"3\r\ntwo\r\n0\r\n\r\n" if path == "/" else b"3\r\none\r\n")


def test_a_head_waits_for_no_body() -> None:
    with serving(app, protocol=Connection) as url:
        address = urlsplit(url)
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=20) as client:
            client.sendall(b"POST /late HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 1\r\n\r\n")
            head = client.recv(65536)
            assert head.endswith(b"\r\n\r\n")
            assert b"x-head: 1" in head
            client.sendall(b"x")
            assert client.makefile("rb").read().endswith(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")


def test_expect_continue_is_answered() -> None:
    writes: list[bytes] = []
    with serving(app, protocol=recording(writes)) as url:
        exchanged(url, post("/read", b"x", "expect: 100-continue"))
    assert [write.split(b" ")[:2] for write in writes[:2]] == [[b"HTTP/1.1", b"100"], [b"HTTP/1.1", b"200"]]
    assert len(writes) == 3


def test_pending_head_of_a_gone_client_is_no_error() -> None:
    async def head_only(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone.set()
        await asyncio.sleep(0)

    gone = asyncio.Event()
    with serving(head_only, protocol=Connection) as url:
        assert exchanged(url, post("/", b"")).endswith(b"\r\n\r\n")
    assert gone.is_set()
