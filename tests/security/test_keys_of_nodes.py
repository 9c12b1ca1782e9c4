"""The key of all nodes goes only where an operator sent it, or where it is known already."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from gateway_keys import make_key
from server_processes import Process, running
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from updraft.cloud_engine.gateway import node_routes
from updraft.cloud_engine.gateway.balancing import directory
from updraft.cloud_engine.gateway.balancing.directory import NodeDirectory
from updraft.cloud_engine.gateway.balancing.node import Node, NodeAddress
from updraft.cloud_engine.gateway.upstream.client import Upstream
from updraft.cloud_engine.gateway.upstream.failures import UnreachableError
from updraft.protocol.http.access import key_proof
from updraft.protocol.safety.system import boot_time
from waiting import wait_for

SECRET = "canary-key-of-all-nodes"


@dataclass
class Listener:
    """A node that keeps the credentials that it is sent. `wants_key`: it answers no other request."""

    wants_key: bool = False
    sent: list[str] = field(default_factory=list[str])

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{rest:path}", self.answer, methods=["GET", "POST"])])

    async def answer(self, request: Request) -> Response:
        self.sent.append(" ".join([*request.headers.values(), str(request.url), (await request.body()).decode()]))
        if self.wants_key and request.headers.get("authorization") != f"Bearer {SECRET}":
            return JSONResponse({"error": {"message": "no key"}}, 401)
        if request.url.path == "/v1/models":
            return JSONResponse({"object": "list", "data": [{"id": "big", "owned_by": "somebody"}]})
        return JSONResponse({"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}}]})


@dataclass
class Keys:
    node: str
    app: str


@contextmanager
def gateway(folder: Path, *more: str) -> Iterator[tuple[Process, Keys]]:
    path = folder / "keys"
    keys = Keys(make_key(path, "node", "node"), make_key(path, "app"))
    command = ("-m", "updraft", "gateway", "--port", "0", "--keys", str(path), "--ledger", str(folder / "db"))
    with running(*command, *more, "--exit-with-parent", UPDRAFT_NODE_API_KEY=SECRET) as process:
        yield process, keys


def register(process: Process, keys: Keys, url: str, method: str = "POST", **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {keys.node}"}
    return httpx.request(method, f"{process.url}/admin/nodes", json={"url": url, **more}, headers=headers, timeout=60)


def chat(process: Process, keys: Keys) -> int:
    body = {"model": "big", "messages": [{"role": "user", "content": "hello"}]}
    headers = {"authorization": f"Bearer {keys.app}"}
    return httpx.post(f"{process.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code


@pytest.mark.parametrize("proof", [None, "", "0" * 64, "é" * 64, key_proof(SECRET, "http://elsewhere:1")])
def test_a_node_key_alone_sends_the_key_of_all_nodes_nowhere(tmp_path: Path, proof: str | None) -> None:
    listener = Listener()
    with serving(listener.app()) as url, gateway(tmp_path) as (process, keys):
        assert register(process, keys, url, proof=proof).status_code == 200
        assert chat(process, keys) == 200
        wait_for(lambda: sum("/health" in sent for sent in listener.sent) > 2)
    assert not any(SECRET in sent for sent in listener.sent)
    assert any("hello" in sent for sent in listener.sent)


def test_a_node_that_proves_it_knows_the_key_gets_it_and_nobody_without_a_proof_takes_it_away(tmp_path: Path) -> None:
    node = Listener(wants_key=True)
    with serving(node.app()) as url, gateway(tmp_path) as (process, keys):
        refused = register(process, keys, url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "node_unusable")
        refused = register(process, keys, url, proof=key_proof("another", url))
        assert refused.status_code == 400 and "UPDRAFT_NODE_API_KEY" in refused.json()["error"]["message"]
        assert not any(SECRET in sent for sent in node.sent)
        assert register(process, keys, url, proof=key_proof(SECRET, url)).status_code == 200
        assert chat(process, keys) == 200
        assert register(process, keys, url, "DELETE").json()["removed"] is False
        assert register(process, keys, url).status_code == 200  # a heartbeat without it
        node.sent.clear()
        assert chat(process, keys) == 200
        assert all(SECRET in sent for sent in node.sent)
        assert register(process, keys, url, "DELETE", proof=key_proof(SECRET, url)).json()["removed"] is True
        refused = register(process, keys, url)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "node_unusable")


def test_a_proof_that_expires_is_renewed_by_a_proof_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = boot_time()
    monkeypatch.setattr(directory, "boot_time", lambda: now)
    kept = NodeDirectory(tmp_path / "nodes")
    kept.create()
    for passed, is_proven, proven in ((0, True, [True]), (6, False, [True]), (11, False, [False]), (12, True, [True])):
        monkeypatch.setattr(directory, "boot_time", lambda passed=passed: now + passed)
        kept.register("http://a", 1, is_proven=is_proven)
        assert [node.gets_shared_key for node in kept.addresses()] == proven


def test_a_redirect_of_a_proven_node_takes_the_key_nowhere(tmp_path: Path) -> None:
    other = Listener()

    async def answer(request: Request) -> Response:
        if request.url.path == "/v1/models":
            return JSONResponse({"object": "list", "data": [{"id": "big", "owned_by": "somebody"}]})
        return Response(status_code=307, headers={"location": f"{elsewhere}/v1/chat/completions"})

    app = Starlette(routes=[Route("/{rest:path}", answer, methods=["GET", "POST"])])
    with serving(other.app()) as elsewhere, serving(app) as url, gateway(tmp_path, "--node", url) as (process, keys):
        assert chat(process, keys) in (502, 503)
    assert other.sent == []


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "[fe80::1]",
        "0.0.0.0",
        "[::]",
        "224.0.0.1",
        "255.255.255.255",
        "[::ffff:169.254.169.254]",
        "[64:ff9b::a9fe:a9fe]",
        "[2002:a9fe:a9fe::1]",
        "[::a9fe:a9fe]",
        "2852039166",
    ],
)
def test_addresses_of_no_node_are_not_asked(tmp_path: Path, host: str) -> None:
    with gateway(tmp_path) as (process, keys):
        refused = register(process, keys, f"http://{host}:80")
        assert refused.status_code == 400
        assert "nodes may not register the address" in refused.json()["error"]["message"]


def test_a_name_that_leads_elsewhere_after_its_registration_is_sent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: the check at the registration has seen another address."""
    listener, resolve = Listener(), socket.getaddrinfo

    def rebound(host: Any, *rest: Any, **more: Any) -> Any:
        return resolve("127.0.0.1" if host == "node.example" and not more.get("flags") else host, *rest, **more)

    async def probe(address: NodeAddress) -> int:
        upstream = Upstream(SECRET)
        try:
            return (await upstream.get(Node(address).target, b"/health"))[0]
        finally:
            await upstream.close()

    with serving(listener.app()) as url:
        monkeypatch.setattr(socket, "getaddrinfo", rebound)
        port = url.rpartition(":")[2]
        for is_proven in (False, True):
            address = NodeAddress(f"http://node.example:{port}", gets_shared_key=is_proven, is_registered=True)
            with pytest.raises(UnreachableError, match="nodes may not register the address"):
                asyncio.run(probe(address))
        assert listener.sent == []
        for host in ("127.0.0.1", "localhost", "127.1"):
            assert asyncio.run(probe(NodeAddress(f"http://{host}:{port}", is_registered=True))) == 200
        assert asyncio.run(probe(NodeAddress(f"http://node.example:{port}"))) == 200, "an operator named it"


@pytest.mark.parametrize(
    ("peer", "headers", "may"),
    [
        ("127.0.0.1", {"host": "127.0.0.1:8000"}, True),
        ("::1", {"host": "LOCALHOST"}, True),
        ("10.0.0.9", {"host": "127.0.0.1:8000"}, False),
        ("127.0.0.1", {"host": "updraft.example"}, False),  # a proxy on this machine passes the caller's on
        ("127.0.0.1", {"host": "127.0.0.1:8000", "x-forwarded-for": "203.0.113.9"}, False),
        ("127.0.0.1", {"host": "127.0.0.1:8000", "via": "1.1 proxy"}, False),
        ("127.0.0.1", {}, False),
    ],
)
def test_only_this_machine_registers_its_loopback(peer: str, headers: dict[str, str], may: bool) -> None:
    request: Any = SimpleNamespace(client=SimpleNamespace(host=peer), headers=headers)
    for url in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "http://127.1:1"):
        why = asyncio.run(node_routes._why_out_of_reach(Node(NodeAddress(url)), request))
        assert (why == "") is may, (url, why)
