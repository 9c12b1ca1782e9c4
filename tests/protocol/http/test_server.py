"""The HTTP shell over real sockets, in a real process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gzip
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from raw_http import exchanged
from serving import serving
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket
from updraft.protocol.errors import PortInUseError, RequestCancelledError
from updraft.protocol.http import connection
from updraft.protocol.http.app import cancel_on_disconnect, create_app, read_body
from updraft.protocol.http.server import bind_socket
from waiting import wait_for
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

APP = Path(__file__).with_name("shell_app.py")
TYPING = Path(__file__).parents[3] / ".typing"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TYPING)}


@contextmanager
def running(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with subprocess.Popen(
        [sys.executable, str(APP), *arguments], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("ready http://127.0.0.1:")
            yield line.split()[1], process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running() as (url, _):
        yield url


def error_of(response: httpx.Response, status: int) -> dict[str, object]:
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_ready_means_accepting(url: str) -> None:
    assert httpx.get(f"{url}/closed").status_code == 200


def test_typed_error(url: str) -> None:
    response = httpx.get(f"{url}/typed")
    assert error_of(response, 400)["code"] == "context_length_exceeded"
    assert response.headers["x-should-retry"] == "false"


def test_unknown_route_and_wrong_method(url: str) -> None:
    assert error_of(httpx.get(f"{url}/nowhere"), 404)["code"] == "not_found"
    response = httpx.get(f"{url}/echo")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert "POST" in response.headers["allow"]


def test_bug_shows_no_detail_and_the_process_lives_on(url: str) -> None:
    response = httpx.get(f"{url}/bug", headers={"x-request-id": "my-id"})
    error = error_of(response, 500)
    assert "secret" not in response.text
    assert "my-id" in str(error["message"])
    assert response.headers["x-request-id"] == "my-id"
    assert httpx.get(f"{url}/closed").status_code == 200


def test_harmful_request_id_is_replaced(url: str) -> None:
    response = httpx.get(f"{url}/closed", headers={"x-request-id": "a" * 1000})
    assert response.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("kind", ["gzip", "deflate", "br", "gzip, identity"])
def test_a_compressed_body_is_refused_by_name(url: str, kind: str) -> None:
    refused = httpx.post(f"{url}/echo", content=gzip.compress(b"a" * 500), headers={"content-encoding": kind})
    assert "Content-Encoding" in str(error_of(refused, 400)["message"])
    assert httpx.post(f"{url}/echo", content=b"a", headers={"content-encoding": "identity"}).content == b"a"


def test_a_body_in_chunks_of_a_byte_leaves_the_event_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of the socket holds up to 43,000 of them. Counted is what one callback of the event loop takes."""
    counts = [0]
    run, on_body = asyncio.Handle._run, connection.Connection.on_body

    def counted_run(handle: asyncio.Handle) -> None:
        counts.append(0)
        run(handle)

    def counted_on_body(self: connection.Connection, body: bytes) -> None:
        counts[-1] += 1
        on_body(self, body)

    app = create_app("test", max_body_bytes=2**20)
    app.add_api_route("/echo", _echo, methods=["POST"])
    monkeypatch.setattr(asyncio.Handle, "_run", counted_run)
    monkeypatch.setattr(connection.Connection, "on_body", counted_on_body)
    body = os.urandom(300_000)
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    with serving(app, protocol=connection.Connection, loop="asyncio") as url:
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        assert exchanged(url, head + chunks + b"0\r\n\r\n").endswith(body)
    assert sum(counts) == len(body)
    assert max(counts) <= connection._MAX_PART / 6 + 1


OFFERS = ("Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
          "Connection: upgrade\r\nUpgrade: websocket\r\n")  # fmt: skip


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("framing", ["content-length: 50", "transfer-encoding: chunked"])
@pytest.mark.parametrize("cut", [0, 1, 60, 10_000])
def test_an_offer_of_another_protocol_leaves_the_body_a_body(url: str, offer: str, framing: str, cut: int) -> None:
    """As curl --http2 and Java's client make them. A body that is a request is no second one, however it comes."""
    inner = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n".ljust(50, b"x")
    body = b"32\r\n" + inner + b"\r\n0\r\n\r\n" if framing.endswith("chunked") else inner
    head = f"POST /echo HTTP/1.1\r\nhost: localhost\r\n{offer}{framing}\r\n\r\n".encode()
    sent, last = (head + body) * 2, b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    address = url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=60) as client:
        for piece in (sent[:cut], sent[cut : len(head) + 3], sent[max(cut, len(head) + 3) :] + last):
            client.sendall(piece)
            time.sleep(0.01)
        received = b"".join(iter(lambda: client.recv(65536), b""))
    answers = [answer[:3] for answer in received.split(b"HTTP/1.1 ")[1:]]
    assert (answers, received.count(inner)) == ([b"200", b"200", b"404"], 2), received


def test_a_websocket_lasts_and_has_a_connection_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", 0.2)
    app = create_app("test")
    app.add_api_route("/slow", _slow, methods=["POST"])

    async def chat(socket: WebSocket) -> None:
        await socket.accept()
        while True:
            await socket.send_text(await socket.receive_text())

    app.add_api_websocket_route("/chat", chat)
    with serving(app, protocol=connection.Connection, loop="asyncio") as url:
        with connect(f"ws{url.removeprefix('http')}/chat") as client:
            time.sleep(0.5)
            client.send("there")
            assert client.recv(timeout=60) == "there"
        opening = "".join(f"{name}\r\n" for name in UPGRADE)
        slow = b"POST /slow HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
        received = exchanged(url, slow + f"GET /chat HTTP/1.1\r\n{opening}\r\n".encode())
        assert [answer[:3] for answer in received.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"]
        assert b"on a new connection" in received


def test_the_limit_of_bodies_holds_for_messages_of_websockets() -> None:
    with running("--websockets") as (url, _), connect(f"ws{url.removeprefix('http')}/chat") as client:
        client.send("a" * 1000)
        assert client.recv(timeout=60) == "a" * 1000
        client.send("a" * 1001)
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=60)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


UPGRADE = ("host: localhost", "connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13",
           "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==")  # fmt: skip


async def _slow(_: Request) -> Response:
    await asyncio.sleep(0.1)
    return Response()


@pytest.mark.parametrize(("beginning", "end"), [(b"1;", b"\r\na\r\n0\r\n\r\n"), (b"1\r\na\r\n0\r\nx: ", b"\r\n\r\n")])
def test_chunk_extensions_and_trailers_are_bounded(url: str, beginning: bytes, end: bytes) -> None:
    head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    received = exchanged(url, head + beginning + b"a" * 2_000_000 + end)
    assert received == b"" or received.startswith(b"HTTP/1.1 400 "), received


def test_as_many_requests_as_a_read_holds_are_answered(url: str) -> None:
    """One more than the events of a turn, without a wait for the next read."""
    asked = 400
    request = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\na"
    last = request.replace(b"content-length", b"connection: close\r\ncontent-length")
    assert exchanged(url, request * (asked - 1) + last).count(b"HTTP/1.1 200") == asked


async def _echo(request: Request) -> Response:
    return Response(await read_body(request))


def test_body_limit_announced_and_chunked(url: str) -> None:
    assert httpx.post(f"{url}/echo", content=b"x" * 1000).content == b"x" * 1000
    assert error_of(httpx.post(f"{url}/echo", content=b"x" * 1001), 413)["code"] == "request_too_large"
    assert error_of(httpx.post(f"{url}/echo", content=b"x" * 20_000_000), 413)["code"] == "request_too_large"
    chunks = (b"x" * 600 for _ in range(3))
    assert error_of(httpx.post(f"{url}/echo", content=chunks), 413)["code"] == "request_too_large"


def test_too_large_is_answered_before_the_body_came(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\nfirst bytes")
        assert client.recv(1000).startswith(b"HTTP/1.1 413")


def sent(url: str, *pieces: bytes) -> bytes:
    """The response to raw bytes, until the server closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as client:
        for piece in pieces:
            client.sendall(piece)
        return b"".join(iter(lambda: client.recv(65536), b""))


HEAD = b"POST /echo HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\nhello", "invalid_http"),
        (HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\nGET / HTTP/1.1", "invalid_http"),
        (HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello", "invalid_http"),
        (HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\n", "invalid_http"),
        (HEAD + b"content-length: -1\r\n\r\n", "invalid_http"),
        (HEAD + b"host: evil.example\r\n\r\n", "invalid_http"),
        (HEAD + b"x: a\0b\r\n\r\n", "invalid_http"),
        (HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "invalid_http"),
        (HEAD + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "invalid_http"),
        (HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "invalid_http"),
        (b"POST /echo HTTP/1.0\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "invalid_http"),
        (b"GET /closed\r\n\r\n", "invalid_http"),
        (b"GET /closed HTTP/2.0\r\nhost: localhost\r\n\r\n", "invalid_http"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nnonsense\r\n", "invalid_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "invalid_http"),
        (HEAD + b"x: " + b"a" * 100_000, "invalid_http"),
        (HEAD + b"".join(b"x-%d: a\r\n" % number for number in range(300)) + b"\r\n", "too_many_headers"),
    ],
)  # fmt: skip
def test_malformed_request_gets_a_typed_error_and_a_close(url: str, request_: bytes, code: str) -> None:
    head, _, body = sent(url, request_).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head.lower()
    assert len(body) < 1000
    assert code.encode() in body
    assert b"HTTP/1.1" not in body.replace(b"not valid HTTP/1.1", b""), "what follows is no second request"
    assert httpx.get(f"{url}/closed").status_code == 200


def test_requests_sent_together_are_answered_in_turn_and_trailers_are_no_headers(url: str) -> None:
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n0\r\nhost: evil.example\r\n\r\n"
    answers = sent(url, chunked + HEAD + b"content-length: 3\r\nconnection: close\r\n\r\ntwo")
    assert [part[-3:] for part in answers.split(b"HTTP/1.1 200 OK")[1:]] == [b"one", b"two"]


def test_an_upgrade_is_a_request_like_others(url: str) -> None:
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "a", "sec-websocket-version": "13"}
    assert error_of(httpx.get(f"{url}/ws", headers=upgrade), 404)
    assert httpx.get(f"{url}/closed", headers={**upgrade, "host": "evil.example"}).status_code == 403


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (b"POST /echo HTTP/1.1\r\n", b"host: localhost\r\n"),
        (HEAD + b"content-length: 10\r\n\r\n", b"12345"),
        (b"GET /echo HTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET /echo HTTP/1.1\r\n"),
    ],
)
def test_a_request_that_does_not_end_does_not_keep_its_connection(
    pieces: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def echo(request: Request) -> Response:
        return Response(await read_body(request))

    app = create_app("test")
    app.add_route("/echo", echo, methods=["GET", "POST"])
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", 0.3)
    with serving(app, protocol=connection.Connection) as url:
        answer = sent(url, *pieces)
    assert answer.count(b"HTTP/1.1 ") == sum(piece.startswith(b"GET") for piece in pieces[:1])


def test_a_client_that_reads_nothing_is_cut_off_and_one_that_reads_slowly_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Semaphore(0)

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        try:
            with cancel_on_disconnect(Request(scope, receive)):
                while True:
                    await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
        except RequestCancelledError:
            ended.release()

    monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 1.0)
    with (
        serving(stream, protocol=connection.Connection) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client,
    ):
        client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        for _ in range(30):
            assert client.recv(2**20)
            assert not ended.acquire(timeout=0.05)
        assert ended.acquire(timeout=30)


def test_disconnect_closes_the_stream_despite_pipelined_requests(url: str) -> None:
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as client:
        client.sendall(
            b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\nGET /closed HTTP/1.1\r\nhost: localhost\r\n\r\n"
        )
        while b"data: 1" not in client.recv(65536):
            pass
        assert httpx.get(f"{url}/closed").json()["closed_at"] == []
    wait_for(lambda: httpx.get(f"{url}/closed").json()["closed_at"])  # its next piece would come after an hour
    assert httpx.get(f"{url}/closed").json()["in_flight"] == 1


def test_head_is_a_get_without_its_body_and_leaves_no_stream(url: str) -> None:
    before = len(httpx.get(f"{url}/closed").json()["closed_at"])
    with httpx.Client(base_url=url) as http:
        for _ in range(2):
            head = http.head("/endless")
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"].startswith("text/event-stream")
        assert http.head("/typed").status_code == 400
        assert http.head("/echo").status_code == 405
        seen = http.get("/closed").json()
    assert (len(seen["closed_at"]), seen["in_flight"]) == (before, 1), "its body was not even begun"


def test_a_stream_that_fails_is_cut_not_ended(url: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError), httpx.stream("GET", f"{url}/broken-stream") as response:
        list(response.iter_bytes())


def test_busy_port_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"Port {port} .*--port"):
            bind_socket("127.0.0.1", port)


def test_sigterm_finishes_requests_in_flight_and_refuses_others() -> None:
    with (
        running() as (url, process),
        httpx.Client(base_url=url) as client,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        client.get("/closed")
        in_flight = pool.submit(httpx.get, f"{url}/slow", timeout=30)
        while client.get("/closed").json()["in_flight"] < 2:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        while (refused := client.get("/closed")).status_code == 200:
            pass
        assert error_of(refused, 503)["type"] == "overloaded_error"
        assert refused.headers["retry-after"] == "1"
        assert in_flight.result().text == "finished"
        assert process.wait(60) == 0


def test_child_follows_a_parent_that_was_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    child = [sys.executable, str(APP), "--exit-with-parent", "--ready-file", str(ready)]
    program = f"import subprocess, time; print(subprocess.Popen({child!r}).pid, flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for(ready.exists)
        parent.kill()
    wait_for(lambda: not running_process(pid))


def test_a_ready_file_that_cannot_be_written_stops_the_app_in_order(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, str(APP), "--ready-file", str(tmp_path / "file" / "ready")]
    ended = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
    assert ended.returncode != 0
    assert "cannot be written" in ended.stderr
    assert "CancelledError" not in ended.stderr


def running_process(pid: int) -> bool:
    """Whether it runs; a zombie that its new parent has not collected does not."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
