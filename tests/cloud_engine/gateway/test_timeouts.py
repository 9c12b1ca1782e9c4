"""Hanging ends: a stopped node, a client that leaves or trickles, and more idle connections than descriptors."""

from __future__ import annotations

import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from server_processes import TINY_LIMIT
from updraft.cloud_engine.gateway.upstream.timeouts import Timeouts
from updraft.protocol.errors import ConfigurationError
from waiting import wait_for

STREAM = {"model": "echo", "messages": [{"role": "user", "content": "a" * 400}], "stream": True}


def gateway(*nodes: Any, **timeouts: float) -> list[str]:
    options = [word for name, value in timeouts.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    urls = [word for node in nodes for word in ("--node", node.url)]
    return ["gateway", "--port", "0", "--no-auth", "--exit-with-parent", *urls, *options]


def connected(url: str) -> socket.socket:
    address = urlsplit(url)
    assert address.hostname
    assert address.port
    return socket.create_connection((address.hostname, address.port), timeout=30)


def test_a_node_that_stops_in_its_answer_ends_the_stream(spawn: Any, spawn_fake_node: Any, tmp_path: Path) -> None:
    node = spawn_fake_node("--delay", "0.02")
    running = spawn("-m", "updraft", *gateway(node, idle_timeout_s=2), "--ledger", str(tmp_path / "db"))
    began = 0.0
    with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=STREAM, timeout=60) as response:
        lines = response.iter_lines()
        for _ in range(6):
            assert not next(lines).startswith('data: {"error"')
        began = time.monotonic()
        node.popen.send_signal(signal.SIGSTOP)
        *_, last = [line for line in lines if line]
    assert '"type":"timeout_error"' in last.replace(" ", ""), last
    assert "2 s" in last
    assert time.monotonic() - began > 0.5


def test_node_drops_requests_of_clients_that_left(spawn: Any, spawn_fake_node: Any, tmp_path: Path) -> None:
    node = spawn_fake_node("--delay", "0.05")
    running = spawn("-m", "updraft", *gateway(node), "--ledger", str(tmp_path / "db"))
    with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=STREAM, timeout=60) as response:
        next(response.iter_lines())
    aborted = re.compile(r"^\w*aborted_requests\w* 1(\.0)?$", re.MULTILINE)
    wait_for(lambda: aborted.search(httpx.get(f"{node.url}/metrics").text))  # a whole answer is not aborted


def test_a_body_that_trickles_in_is_refused(spawn: Any, spawn_fake_node: Any, tmp_path: Path) -> None:
    running = spawn("-m", "updraft", *gateway(spawn_fake_node(), timeout_s=1), "--ledger", str(tmp_path / "db"))
    with connected(running.url) as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900\r\n\r\n{")
        answer = b""
        try:
            while not answer.endswith(b"}}") and (piece := sock.recv(4096)):
                answer += piece
                sock.sendall(b" ")
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert answer.startswith(b"HTTP/1.1 504 "), answer


@pytest.mark.skipif(sys.platform == "win32", reason="no descriptors to run out of")
def test_more_idle_connections_than_descriptors_stop_nobody(spawn: Any, spawn_fake_node: Any, tmp_path: Path) -> None:
    node = spawn_fake_node()
    running = spawn("-c", TINY_LIMIT, *gateway(node), "--ledger", str(tmp_path / "db"))
    idle = [connected(running.url) for _ in range(300)]
    try:
        for _ in range(3):
            assert httpx.get(f"{running.url}/health", timeout=30).status_code == 200
        answer = httpx.post(f"{running.url}/v1/chat/completions", json={**STREAM, "stream": False}, timeout=30)
        assert answer.status_code == 200
    finally:
        for sock in idle:
            sock.close()


@pytest.mark.parametrize("name", ["connect_timeout_s", "first_token_timeout_s", "idle_timeout_s", "timeout_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_is_a_number_above_0(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name} must be"):
        Timeouts(**{name: value})
