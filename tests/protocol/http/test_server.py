"""The HTTP shell over real sockets, in a real process."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from updraft.protocol.errors import PortInUseError
from updraft.protocol.http.server import bind_socket

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


def test_body_limit_announced_and_chunked(url: str) -> None:
    assert httpx.post(f"{url}/echo", content=b"x" * 1000).content == b"x" * 1000
    assert error_of(httpx.post(f"{url}/echo", content=b"x" * 1001), 413)["code"] == "request_too_large"
    assert error_of(httpx.post(f"{url}/echo", content=b"x" * 20_000_000), 413)["code"] == "request_too_large"
    chunks = (b"x" * 600 for _ in range(3))
    assert error_of(httpx.post(f"{url}/echo", content=chunks), 413)["code"] == "request_too_large"


def test_too_large_is_answered_before_the_body_came(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as client:
        client.sendall(b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\nfirst bytes")
        assert client.recv(1000).startswith(b"HTTP/1.1 413")


def test_disconnect_closes_the_stream_at_once(url: str) -> None:
    with httpx.stream("GET", f"{url}/endless") as response:
        chunks = response.iter_bytes()
        assert next(chunks) == b"data: 1\n\n"
        assert httpx.get(f"{url}/closed").json()["closed_at"] == []
    left = time.time()
    deadline = time.monotonic() + 5
    while not (report := httpx.get(f"{url}/closed").json())["closed_at"]:
        assert time.monotonic() < deadline
    assert report["closed_at"][0] - left < 1  # 2 ms on an idle machine
    assert report["in_flight"] == 1


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


def test_sigterm_finishes_what_is_in_flight_and_refuses_the_rest() -> None:
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
        deadline = time.monotonic() + 5
        while (refused := client.get("/closed")).status_code == 200:
            assert time.monotonic() < deadline
        assert error_of(refused, 503)["type"] == "overloaded_error"
        assert refused.headers["retry-after"] == "1"
        assert in_flight.result().text == "finished"
        assert process.wait(15) == 0


def test_child_follows_a_parent_that_was_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    child = [sys.executable, str(APP), "--exit-with-parent", "--ready-file", str(ready)]
    program = f"import subprocess, time; print(subprocess.Popen({child!r}).pid, flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        deadline = time.monotonic() + 30
        while not ready.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        parent.kill()
    while running_process(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running_process(pid: int) -> bool:
    """Whether it runs; a zombie that its new parent has not collected does not."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
