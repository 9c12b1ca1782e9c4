"""Requests sent together are answered in turn, and few of them are parsed before: the rest stays bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_http import exchanged
from serving import serving
from starlette.types import Receive, Scope, Send
from updraft.protocol.http import connection
from waiting import wait_for

MOST = connection._MAX_AHEAD + 1  # a head may have begun in the part before
LEAVES = b"GET /last HTTP/1.1\r\nhost: l\r\nconnection: close\r\n\r\n"


class Watched(connection.Connection):
    """Knows how many requests were parsed, on all connections, and how many waited at most."""

    parsed = 0
    most_waiting = 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        Watched.parsed += 1
        Watched.most_waiting = max(Watched.most_waiting, len(self.pipeline))


@dataclass
class Server:
    url: str
    # `/wait` is answered once it is set.
    gate: asyncio.Event

    def connected(self) -> socket.socket:
        address = urlsplit(self.url)
        return socket.create_connection((address.hostname or "", address.port or 0), timeout=20)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    gate = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if scope["path"] == "/wait":
            while not gate.is_set():  # noqa: ASYNC110 - it is set by another thread
                await asyncio.sleep(0.01)
        answer = b"<%b %b>" % (scope["path"].encode(), body)
        length = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": answer})

    with serving(app, protocol=Watched, loop="asyncio") as url:
        yield Server(url, gate)


@pytest.fixture
def waiting(server: Server) -> Server:
    server.gate.clear()
    Watched.parsed = Watched.most_waiting = 0
    return server


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: l\r\n\r\n".encode()


def answers(received: bytes) -> list[bytes]:
    return [part.partition(b"\r\n\r\n")[2] for part in received.split(b"HTTP/1.1 200 OK\r\n")[1:]]


def read_all(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(2**18), b""))


def test_pipelined_requests_are_bounded_and_resume(waiting: Server) -> None:
    asked = 4_000
    with waiting.connected() as client:
        client.sendall(get("/wait") + b"".join(get(f"/{number}") for number in range(asked)) + LEAVES)
        wait_for(lambda: Watched.parsed > connection._MAX_AHEAD)
        assert exchanged(waiting.url, LEAVES), "others are answered, after many turns of the loop"
        assert Watched.parsed <= 1 + MOST + 1
        waiting.gate.set()
        expected = [b"</wait >", *(b"</%d >" % number for number in range(asked)), b"</last >"]
        assert answers(read_all(client)) == expected
    assert Watched.most_waiting <= MOST


def test_pipelined_bytes_are_bounded(waiting: Server) -> None:
    body = b"a" * 60_000
    post = b"POST /p HTTP/1.1\r\nhost: l\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with waiting.connected() as client:
        client.sendall(get("/wait") + post * 3)
        wait_for(lambda: Watched.parsed > 2)
        client.sendall(post * 5 + LEAVES)
        assert exchanged(waiting.url, LEAVES)
        assert Watched.parsed <= 1 + 3 + 1
        waiting.gate.set()
        assert answers(read_all(client)) == [b"</wait >", *[b"</p %b>" % body] * 8, b"</last >"]


def test_a_client_whose_requests_wait_is_not_waited_for(waiting: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of the last that is parsed is there, and its body is with what is not parsed."""
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", 0.1)
    with waiting.connected() as client:
        client.sendall(get("/wait") + b"POST /p HTTP/1.1\r\nhost: l\r\ncontent-length: 1\r\n\r\na" * 20 + LEAVES)
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(20)
        waiting.gate.set()
        assert len(answers(read_all(client))) == 22


OFFER = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
BODIES = st.one_of(
    st.sampled_from([b"", b"\r\n\r\n" * 40, b"\n\r\n", get("/inner") * 3]),
    st.text("\r\nGET /", max_size=40).map(str.encode),
)


@st.composite
def requests(draw: Any) -> tuple[bytes, bytes]:
    """One, and the answer to it."""
    body, offer = draw(BODIES), draw(st.sampled_from([b"", b"", OFFER]))
    head = b"POST /p HTTP/1.1\r\nhost: l\r\n" + offer
    if draw(st.booleans()):
        sent = head + b"content-length: %d\r\n\r\n" % len(body) + body
    else:
        size = draw(st.integers(1, 30))
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        sent = head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    return draw(st.sampled_from([(sent, b"</p %b>" % body), (get("/g"), b"</g >")]))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests(), max_size=40), st.lists(st.integers(0, 4000), max_size=4))
def test_nothing_is_lost_or_reordered_however_it_comes(
    server: Server, sent: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    everything = b"".join(request for request, _ in sent) + LEAVES
    edges = [0, *sorted(cuts), len(everything)]
    with server.connected() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin, end in pairwise(edges):
            client.sendall(everything[begin:end])
        received = read_all(client)
    position = 0
    for answer in [*(answer for _, answer in sent), b"</last >"]:
        position = received.index(b"\r\n\r\n" + answer, position) + 1
    assert received.endswith(b"\r\n\r\n</last >")
    assert received.count(b"date: ") == len(sent) + 1
    assert Watched.most_waiting <= MOST


def test_paused_client_is_not_timed_out(waiting: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of an upload fills what may wait behind an answer that takes its time."""
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", 0.2)
    with waiting.connected() as client:
        client.sendall(get("/wait"))
        wait_for(lambda: Watched.parsed == 1)
        client.sendall(b"POST /upload HTTP/1.1\r\nhost: l\r\ncontent-length: 200000\r\n\r\n" + bytes(70_000))
        client.settimeout(1.0)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(20)
        waiting.gate.set()
        client.sendall(bytes(130_000) + LEAVES)
        got = answers(read_all(client))
    assert [answer.split(b" ")[0] for answer in got] == [b"</wait", b"</upload", b"</last"]
    assert len(got[1]) > 200_000
