"""The end of a connection: seen behind what is unread, waited for by nobody, and after the answers that are due."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from certificates import Authority
from serving import serving
from starlette.types import Receive, Scope, Send
from updraft.protocol.http import connection, tls
from updraft.protocol.http.access import ConnectionLimits
from updraft.protocol.http.app import CLIENT_GONE
from updraft.protocol.http.tls import TlsFiles
from waiting import wait_for

needs_linux = pytest.mark.skipif(not hasattr(select, "POLLRDHUP"), reason="the system does not tell")


class Watched(connection.Connection):
    """Its kernel keeps little of what is sent."""

    ended: threading.Semaphore

    def connection_made(self, transport: Any, below: Any = None) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        super().connection_made(transport, below)

    def connection_lost(self, exc: Exception | None) -> None:
        Watched.ended.release()
        super().connection_lost(exc)


class App:
    def __init__(self) -> None:
        self.begun, self.gone, self.gate = threading.Event(), threading.Event(), threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/wait":
            self.begun.set()
            while not self.gate.is_set():
                if scope[CLIENT_GONE].done():
                    self.gone.set()
                    return
                await asyncio.sleep(0.01)
        answer = b"x" * 40_000 if path in ("/long", "/cut") else b"<%b>" % path.encode()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": answer, "more_body": path == "/cut"})


@pytest.fixture
def app() -> App:
    Watched.ended = threading.Semaphore(0)
    return App()


@contextmanager
def connected(app: App, files: TlsFiles | None, context: ssl.SSLContext | None = None) -> Iterator[socket.socket]:
    """A client that reads little ahead, of a server with `files` for TLS."""
    protocol: Any = Watched
    if files is not None:
        limits = ConnectionLimits(9, 9)
        protocol = partial(tls.Handshake, tls.Certificate(files), limits)
    with serving(app, protocol=protocol, loop="asyncio") as url, socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.settimeout(20)
        plain.connect(("127.0.0.1", urlsplit(url).port))
        if context is None:
            yield plain
        else:
            with context.wrap_socket(plain, server_hostname="localhost") as client:
                yield client


@pytest.fixture(params=["plain", "tls"])
def secured(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[TlsFiles | None, ssl.SSLContext | None]:
    if request.param == "plain":
        return None, None
    monkeypatch.setattr(tls, "Connection", Watched)
    files, authority = TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem"), Authority()
    authority.issue(files.certificate, files.key)
    return files, authority.client()


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: l", *headers, "", ""]).encode()


def post(size: int) -> bytes:
    return b"POST /p HTTP/1.1\r\nhost: l\r\ncontent-length: %d\r\n\r\n" % size


@needs_linux
@pytest.mark.parametrize(
    "behind", [get("/n") * 8, get("/n") * 300, post(70_000) + bytes(70_000), b"BROKEN\0\r\n\r\n", b""]
)
def test_disconnect_is_noticed_after_unread_data(app: App, behind: bytes, secured: Any) -> None:
    with connected(app, *secured) as client:
        client.sendall(get("/wait") + behind)
        assert app.begun.wait(20)
        client.shutdown(socket.SHUT_WR)  # as `close`, which resets the connection where something came unread
        assert app.gone.wait(20)
        assert Watched.ended.acquire(timeout=20)


@pytest.mark.parametrize("ends", ["close", "cut", "eof", "refused", "keep-alive"])
def test_an_answer_that_nobody_reads_does_not_keep_its_connection(
    app: App, ends: str, secured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is too short for the transport to say that it is full."""
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 0.2)
    sent = {"close": get("/long", "connection: close"), "cut": get("/cut"), "refused": get("/long") + b"BROKEN\r\n\r\n"}
    with connected(app, *secured) as client:
        client.sendall(sent.get(ends, get("/long")))
        if ends == "eof":
            client.shutdown(socket.SHUT_WR)
        assert Watched.ended.acquire(timeout=20)


def test_body_after_its_answer_is_not_awaited(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.2)
    with connected(app, None) as client:
        client.sendall(post(10**12))
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        with contextlib.suppress(OSError):
            while not Watched.ended.acquire(timeout=0.01):
                client.sendall(b"x")
            return
        assert Watched.ended.acquire(timeout=20)


def test_body_that_ends_soon_after_its_answer_is_read(app: App) -> None:
    with connected(app, None) as client:
        client.sendall(post(1000))
        assert b"</p>" in client.recv(1000)
        client.sendall(b"x" * 500)
        client.sendall(b"x" * 500 + get("/next", "connection: close"))
        assert client.makefile("rb").read().endswith(b"</next>\r\n0\r\n\r\n")


CHUNKED = b"POST /p HTTP/1.1\r\nhost: l\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "broken",
    [b"BROKEN\0\r\n\r\n", CHUNKED + b"nonsense\r\n", get("no-path"), CHUNKED + b"1;" + b"a" * 70_000, post(-1)],
)
@pytest.mark.parametrize("before", [1, 3])
def test_answers_that_are_due_come_before_a_refusal(app: App, broken: bytes, before: int) -> None:
    due = [get("/wait"), get("/1"), get("/2")][:before]
    with connected(app, None) as client:
        client.sendall(b"".join(due))
        assert app.begun.wait(20)
        client.sendall(broken + get("/behind"))
        client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(20)
        app.gate.set()
        received = client.makefile("rb").read()
    answers = received.split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers[:-1]] == [b"200"] * before
    paths = [b"</wait>", b"</1>", b"</2>"][:before]
    assert all(path in answer for path, answer in zip(paths, answers, strict=False))
    refusal = received[received.index(b"HTTP/1.1 400 ") :]
    assert b"invalid_http" in refusal
    assert b"behind" not in refusal
    wait_for(Watched.ended.acquire)
