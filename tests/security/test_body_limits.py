"""Request bodies cost a caller its limits before they cost the gateway memory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from gateway_keys import make_key
from raw_http import status_of
from server_processes import FAKE_NODE, running
from updraft.cloud_engine.gateway.access.principal import Limits
from updraft.protocol.http.body_memory import OWNER_BYTES
from waiting import wait_for

CHAT = "/v1/chat/completions"
BODY_BYTES = 8 * 2**20
MOST_BYTES = 96 * 2**20  # one body in its copies, and the socket buffers of 40 connections
SMALL = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Busy:
    """A gateway of the test's own."""

    url: str
    pid: int
    narrow: str  # a key that may have one request in flight
    wide: str
    other: str

    def chat(self, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(self.url + CHAT, json=SMALL, headers=headers, timeout=60).status_code

    @contextmanager
    def begun(self, key: str, body: bytes = b"", length: int = BODY_BYTES) -> Iterator[socket.socket]:
        """A request whose body is announced, and comes only so far."""
        address = urlsplit(self.url)
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as client:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
            client.sendall(f"{head}content-length: {length}\r\n\r\n".encode() + body)
            yield client


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Busy]:
    keys = tmp_path / "keys"
    narrow = make_key(keys, "narrow", limits=Limits(max_concurrency=1))
    wide, other = make_key(keys, "wide"), make_key(keys, "other")
    command = ("-m", "updraft", "gateway", "--port", "0", "--keys", str(keys), "--ledger", str(tmp_path / "db"))
    with running(str(FAKE_NODE)) as node, running(*command, "--node", node.url, "--exit-with-parent") as process:
        made = Busy(process.url, process.popen.pid, narrow, wide, other)
        assert [made.chat(key) for key in (narrow, wide, other)] == [200] * 3
        yield made


def test_many_large_bodies_of_a_key_with_one_place_take_the_memory_of_one(busy: Busy) -> None:
    statuses, process = list[int](), psutil.Process(busy.pid)
    before = most = process.memory_info().rss

    def send() -> None:
        with busy.begun(busy.narrow) as client:
            with suppress(BrokenPipeError, ConnectionResetError):  # answered before its end
                client.sendall(bytes(BODY_BYTES))
            with suppress(ConnectionResetError):
                statuses.append(status_of(client.recv(4096)))

    with busy.begun(busy.narrow, b"{"):  # holds the place
        wait_for(lambda: busy.chat(busy.narrow) == 429)
        threads = [threading.Thread(target=send) for _ in range(40)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            most = max(most, process.memory_info().rss)
            threads[-1].join(0.01)
    for thread in threads:
        thread.join()
    assert set(statuses) == {429}
    assert most - before < MOST_BYTES
    wait_for(lambda: busy.chat(busy.narrow) == 200)


def test_unauthenticated_client_sends_no_body(busy: Busy) -> None:
    with busy.begun("nobody") as client:
        assert status_of(client.recv(4096)) == 401


def test_announced_bodies_fill_the_share_of_their_tenant_alone(busy: Busy) -> None:
    with ExitStack() as stack:
        for _ in range(OWNER_BYTES // BODY_BYTES):
            stack.enter_context(busy.begun(busy.wide, b"{"))
        wait_for(lambda: busy.chat(busy.wide) == 429)
        with busy.begun(busy.wide) as client:
            answer = client.recv(4096)
        assert status_of(answer) == 429
        assert b"body_memory_exceeded" in answer
        assert busy.chat(busy.other) == 200
    wait_for(lambda: busy.chat(busy.wide) == 200)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}])
def test_node_reads_no_unauthenticated_body(node: Any, headers: dict[str, str]) -> None:
    address = urlsplit(node.url)
    lines = [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join([f"POST {CHAT} HTTP/1.1", "host: localhost", f"content-length: {BODY_BYTES}", *lines, "", ""])
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as client:
        client.sendall(head.encode())
        assert status_of(client.recv(4096)) == 401


def test_announced_bodies_of_several_tenants_lock_nobody_out(busy: Busy, tmp_path: Path) -> None:
    tenants = [make_key(tmp_path / "keys", f"tenant-{number}") for number in range(4)]
    large = {**SMALL, "messages": [{"role": "user", "content": "hi" * 2**20}]}
    wait_for(lambda: [busy.chat(key) for key in tenants] == [200] * 4)
    with ExitStack() as stack:
        for key in tenants:
            for _ in range(OWNER_BYTES // BODY_BYTES):
                stack.enter_context(busy.begun(key, b"{"))
        refused = stack.enter_context(busy.begun(tenants[0], b"{"))
        assert status_of(refused.recv(4096)) in (429, 503)
        for _ in range(3):
            assert busy.chat(busy.other) == 200
        headers = {"authorization": f"Bearer {busy.other}"}
        answer = httpx.post(busy.url + CHAT, json=large, headers=headers, timeout=60)
        assert answer.status_code == 400, answer.text  # the node has read the body: it is longer than the context
