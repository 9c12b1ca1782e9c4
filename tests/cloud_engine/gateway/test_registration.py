"""Nodes that announce themselves: they come with a key, stay by heartbeats, leave at once, and all workers see them."""

from __future__ import annotations

import asyncio
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import gateway_keys
import httpx
import psutil
import pytest
from ports import free_port
from updraft.cloud_engine.gateway.balancing import directory
from updraft.cloud_engine.gateway.balancing.directory import LEASE_S, NodeDirectory
from updraft.cloud_engine.node.registration import Registration, RegistrationOptions
from updraft.protocol.errors import ConfigurationError, OverloadedError
from updraft.protocol.safety.system import boot_id, boot_time
from waiting import wait_for

BODY = {"model": "echo", "messages": [{"role": "user", "content": "hello"}]}
Gateway = Callable[..., Any]


class Keys:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.node = gateway_keys.make_key(path, "node", "node")
        self.admin = gateway_keys.make_key(path, "admin", "admin")
        self.app = gateway_keys.make_key(path, "app")


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.fixture
def gateway(spawn: Any, keys: Keys, tmp_path: Path) -> Gateway:
    common = [
        "-m",
        "updraft",
        "gateway",
        "--exit-with-parent",
        "--keys",
        str(keys.path),
        "--ledger",
        str(tmp_path / "db"),
    ]
    return lambda *more, port="0": spawn(*common, "--port", port, *more)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def nodes_of(url: str, keys: Keys) -> list[str]:
    return [node["url"] for node in httpx.get(f"{url}/admin/nodes", headers=bearer(keys.admin)).json()["nodes"]]


def ask(url: str, keys: Keys) -> int:
    try:
        return httpx.post(f"{url}/v1/chat/completions", json=BODY, headers=bearer(keys.app), timeout=60).status_code
    except httpx.TransportError:
        return 0


def announce(url: str, key: str, announced: Any, method: str = "POST") -> httpx.Response:
    return httpx.request(method, f"{url}/admin/nodes", json={"url": announced}, headers=bearer(key), timeout=60)


def test_a_gateway_whose_nodes_have_yet_to_register_is_overloaded(gateway: Gateway, keys: Keys) -> None:
    answer = httpx.post(f"{gateway().url}/v1/chat/completions", json=BODY, headers=bearer(keys.app))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert "retry-after" in answer.headers


def test_a_node_comes_serves_and_leaves_at_sigterm(gateway: Gateway, spawn_fake_node: Any, keys: Keys) -> None:
    running = gateway()
    assert httpx.get(f"{running.url}/health").status_code == 503
    node = spawn_fake_node("--register", running.url, "--register-key", keys.node)
    wait_for(lambda: nodes_of(running.url, keys) == [node.url])
    assert ask(running.url, keys) == 200
    node.popen.send_signal(signal.SIGTERM)
    assert node.popen.wait(60) == 0
    assert nodes_of(running.url, keys) == [], "it was told before the node ended"


def test_a_killed_node_vanishes_when_its_heartbeats_stop(gateway: Gateway, spawn_fake_node: Any, keys: Keys) -> None:
    running = gateway()
    node = spawn_fake_node("--register", running.url, "--register-key", keys.node)
    wait_for(lambda: nodes_of(running.url, keys) == [node.url])
    time.sleep(LEASE_S + 1)
    assert nodes_of(running.url, keys) == [node.url], "heartbeats keep it"
    node.popen.kill()
    wait_for(lambda: nodes_of(running.url, keys) == [])


def test_a_gateway_that_starts_anew_has_its_nodes_again(gateway: Gateway, spawn_fake_node: Any, keys: Keys) -> None:
    first = gateway(port=str(free_port()))
    node = spawn_fake_node("--register", first.url, "--register-key", keys.node)
    wait_for(lambda: nodes_of(first.url, keys) == [node.url])
    first.popen.kill()
    first.popen.wait(60)
    Path(f"{keys.path}.nodes").unlink()  # not even the file is needed
    second = gateway(port=first.url.rpartition(":")[2])
    wait_for(lambda: ask(second.url, keys) == 200)


@pytest.mark.skipif(sys.platform == "win32", reason="workers are forked")
def test_every_worker_sees_a_node_come_and_leave(gateway: Gateway, spawn_fake_node: Any, keys: Keys) -> None:
    running = gateway("--workers", "2")
    node = spawn_fake_node("--register", running.url, "--register-key", keys.node)
    wait_for(lambda: nodes_of(running.url, keys) == [node.url])
    workers = psutil.Process(running.popen.pid).children()
    assert len(workers) == 2
    for worker in workers:  # the other one answers alone
        worker.suspend()
        try:
            wait_for(lambda: ask(running.url, keys) == 200)
        finally:
            worker.resume()
    assert node.url in httpx.get(f"{running.url}/metrics").text
    node.popen.terminate()
    wait_for(lambda: node.url not in httpx.get(f"{running.url}/metrics").text)  # whichever tells it, of all


def test_refused_registrations(gateway: Gateway, fake_node: Any, keys: Keys) -> None:
    running = gateway()
    assert announce(running.url, "stranger", fake_node.url).status_code == 401
    for key in (keys.app, keys.admin):
        assert announce(running.url, key, fake_node.url).status_code == 403
        assert announce(running.url, key, fake_node.url, "DELETE").status_code == 403
    for url in (
        "ftp://h",
        "file:///etc/passwd",
        "http://",
        "h:80",
        "http://user:canary@127.0.0.1:1",
        "http://127.0.0.1:1/\r\nx: y",
        "http://127.0.0.1:1/?x=1",
        "http://a b",
        "",
        5,
        "x" * 3000,
    ):
        refused = announce(running.url, keys.node, url)
        assert refused.status_code == 400, url
        assert refused.json()["error"]["param"] == "url"
        assert "canary" not in refused.text
    for url in ("http://127.0.0.1:1", "http://127.0.0.1:1/v1", running.url):  # nobody; a server without models
        refused = announce(running.url, keys.node, url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "node_unusable"), refused.text
    assert nodes_of(running.url, keys) == []
    assert announce(running.url, keys.node, fake_node.url + "/v1/").json() == {"url": fake_node.url, "lease_s": LEASE_S}
    assert ask(running.url, keys) == 200
    assert announce(running.url, keys.node, fake_node.url, "DELETE").json()["removed"] is True
    assert announce(running.url, keys.node, fake_node.url, "DELETE").status_code == 404
    assert nodes_of(running.url, keys) == []


def test_a_configured_node_cannot_be_removed(gateway: Gateway, fake_node: Any, keys: Keys) -> None:
    running = gateway("--node", fake_node.url)
    wait_for(lambda: nodes_of(running.url, keys) == [fake_node.url])
    kept = announce(running.url, keys.node, fake_node.url, "DELETE")
    assert kept.json() == {"url": fake_node.url, "removed": False}
    assert nodes_of(running.url, keys) == [fake_node.url]


def test_node_registers_with_every_address_of_a_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a headless service of Kubernetes. One of them is down."""
    told: list[tuple[str, str, str]] = []

    class Gateway(BaseHTTPRequestHandler):
        def answer(self) -> None:
            told.append((self.command, str(self.server.server_address[0]), str(self.headers["host"])))
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(404 if self.command == "DELETE" else 200)  # the lease has ended
            self.send_header("content-length", "0")
            self.end_headers()

        do_POST = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            pass

    async def live(url: str) -> None:
        registration = Registration(RegistrationOptions(url, "key"), "http://10.0.0.9:4116", 4)
        registration.start()
        await asyncio.to_thread(wait_for, lambda: len(told) == 2)
        await registration.leave()

    first = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    port = first.server_address[1]
    resolve = socket.getaddrinfo
    nodes = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", port)) for last in (1, 2, 3)]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: nodes if host == "many" else resolve(host, *a, **k)
    )
    with first, ThreadingHTTPServer(("127.0.0.2", port), Gateway) as second:
        for server in (first, second):
            Thread(target=server.serve_forever, daemon=True).start()
        asyncio.run(live(f"http://many:{port}"))
        first.shutdown()
        second.shutdown()
    expected = [(method, f"127.0.0.{last}", f"many:{port}") for method in ("DELETE", "POST") for last in (1, 2)]
    assert sorted(told) == expected
    assert "deregister" not in caplog.text, "a node that is not registered needs no removal"


def test_a_static_node_is_not_taken_twice(gateway: Gateway, fake_node: Any, keys: Keys) -> None:
    running = gateway("--node", fake_node.url)
    assert announce(running.url, keys.node, fake_node.url).status_code == 200
    assert nodes_of(running.url, keys) == [fake_node.url]
    assert announce(running.url, keys.node, fake_node.url, "DELETE").status_code == 200
    assert nodes_of(running.url, keys) == [fake_node.url], "an operator named it"


def test_the_directory_is_bounded_private_and_shares_what_a_node_takes(tmp_path: Path) -> None:
    kept = NodeDirectory(tmp_path / "nodes", concurrency=9, workers=4)
    kept.create()
    assert (tmp_path / "nodes").stat().st_mode & 0o077 == 0
    kept.register("http://a", 16, is_proven=True)
    kept.register("http://a", 8, is_proven=False)
    kept.register("http://b", None, is_proven=True)
    nodes = sorted((node.url, node.concurrency, node.gets_shared_key) for node in kept.addresses())
    assert nodes == [("http://a", 4, True), ("http://b", 3, True)], "a heartbeat without a proof changes nothing"
    with closing(sqlite3.connect(tmp_path / "nodes")) as file, file:
        rows = [(f"http://{number}", boot_id()) for number in range(1022)]
        file.executemany("INSERT INTO leases VALUES (?, 1, 0, ?, 1e12)", rows)
    with pytest.raises(OverloadedError):
        kept.register("http://one-more", 1, is_proven=False)
    kept.register("http://7", 1, is_proven=False)


def test_leases_follow_the_clock_of_the_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = NodeDirectory(tmp_path / "nodes")
    nodes.create()
    nodes.register("http://a", 1, is_proven=False)
    wall = time.time
    for step_s in (-86_400.0, 86_400.0):
        monkeypatch.setattr(time, "time", lambda step_s=step_s: wall() + step_s)
        assert len(nodes.addresses()) == 1
    later = boot_time() + LEASE_S + 1
    monkeypatch.setattr(directory, "boot_time", lambda: later)
    assert nodes.addresses() == []
    monkeypatch.setattr(directory, "boot_time", lambda: 0.0)
    assert len(nodes.addresses()) == 1
    monkeypatch.setattr(directory, "boot_id", lambda: "another boot")
    assert nodes.addresses() == []
    nodes.register("http://b", 1, is_proven=False)
    with closing(sqlite3.connect(tmp_path / "nodes")) as file:
        assert file.execute("SELECT url FROM leases").fetchall() == [("http://b",)]


@pytest.mark.parametrize(
    ("gateway_url", "host", "param"),
    [
        ("http://10.0.0.1:8000", "127.0.0.1", "register"),
        ("ftp://127.0.0.1", "127.0.0.1", "register"),
        ("http://[::1", "127.0.0.1", "register"),
        ("https://h", "0.0.0.0", "register_as"),
    ],
)
def test_a_node_refuses_to_register_where_it_cannot(gateway_url: str, host: str, param: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RegistrationOptions(gateway_url, "key").check(host, insecure=False)
    assert caught.value.param == param
