"""A node is out when it refuses or is silent for long, and not when it is late while its streams go on."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
from updraft.cloud_engine.gateway.balancing import health
from updraft.cloud_engine.gateway.balancing.health import HealthWatch, ProbeTimeout
from updraft.cloud_engine.gateway.balancing.node import Node, NodeAddress
from updraft.cloud_engine.gateway.upstream.client import Upstream, UpstreamRequest
from updraft.cloud_engine.gateway.upstream.failures import UpstreamFailure
from updraft.cloud_engine.gateway.upstream.pool import PoolLimits

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_MIN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(health, "OWN_STALL_S", 600.0)  # this process may be stalled, too, on a busy machine


def test_the_timeout_follows_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_MIN_TIMEOUT_S", 2.0)
    timeout = ProbeTimeout()
    for _ in range(50):
        timeout.answered(0.01)
    assert timeout.seconds == 2
    for after_s in (1.5, 1.9) * 20:
        timeout.answered(after_s)
    assert 2 < timeout.seconds < 4
    for _ in range(5):
        timeout.answered(9.0)
    assert timeout.seconds == 10
    for _ in range(50):
        timeout.answered(0.01)
    assert timeout.seconds == 2


@asynccontextmanager
async def silent_node() -> AsyncGenerator[str]:
    """It answers no probe, but each lets its streams go on by a piece."""
    streams: list[asyncio.StreamWriter] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /stream"):
                streams.append(writer)
                writer.write(HEAD)
            for stream in streams:
                stream.write(b"1\r\nx\r\n")
            await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def test_a_late_probe_counts_only_while_nothing_comes() -> None:
    async def run() -> None:
        async with silent_node() as url:
            node, upstream = Node(NodeAddress(url)), Upstream(None)
            node.probed()
            watch = HealthWatch(node, upstream, lambda: None)
            async with upstream.open(node.target, UpstreamRequest(b"GET", b"/stream")):
                for _ in range(4):
                    await watch.probe(with_models=False)
                assert node.healthy
            for left in (True, True, False):
                await watch.probe(with_models=False)
                assert node.healthy == left
            assert node.breaker.reason == "3 consecutive probes timed out after 0.1 s"

    asyncio.run(run())


def test_a_probe_is_not_late_while_the_gateway_itself_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "OWN_STALL_S", 0.5)

    async def run() -> None:
        async with silent_node() as url:
            node = Node(NodeAddress(url))
            node.probed()
            watch = HealthWatch(node, Upstream(None), lambda: None)
            for _ in range(4):
                asyncio.get_running_loop().call_later(0.05, time.sleep, 0.8)
                await watch.probe(with_models=False)
            assert node.healthy

    asyncio.run(run())


def test_requests_in_flight_outlast_a_short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is out of rotation may only be slow: what it has begun fails after a long silence."""

    async def run() -> None:
        async with silent_node() as url:
            node, upstream = Node(NodeAddress(url)), Upstream(None)
            watch = HealthWatch(node, upstream, lambda: None)

            async def be_silent() -> None:
                for _ in range(4):
                    await watch.probe(with_models=False)
                assert not node.healthy

            async with upstream.open(node.target, UpstreamRequest(b"GET", b"/stream")) as response:
                monkeypatch.setattr(upstream, "last_heard", lambda _: 0.0)  # the stream's pieces do not count
                await be_silent()
                assert b"x" in await response.read()
                monkeypatch.setattr(health, "_HUNG_S", 0.0)
                await be_silent()
                with pytest.raises(UpstreamFailure, match="consecutive probes timed out"):
                    while await response.read():
                        pass

    asyncio.run(run())


def test_a_late_connection_is_no_refused_one() -> None:
    async def run(url: str) -> None:
        node = Node(NodeAddress(url))
        node.probed()
        watch = HealthWatch(node, Upstream(None, PoolLimits(connect_s=0.05)), lambda: None)
        for left in (True, True, False):
            await watch.probe(with_models=False)
            assert node.healthy == left

    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for waiting in (first, second):  # the line of those that wait is full, and nobody takes them out
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        asyncio.run(run(f"http://127.0.0.1:{listener.getsockname()[1]}"))


def test_gateway_fault_excludes_the_node_and_probing_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        upstream = Upstream(None)
        node = Node(NodeAddress("http://127.0.0.1:1"))
        watch = HealthWatch(node, upstream, lambda: None)

        async def faulty(*_arguments: object) -> tuple[int, bytes]:
            raise TypeError("no such thing")

        monkeypatch.setattr(upstream, "get", faulty)
        await watch.probe(with_models=True)
        assert "the probe failed" in node.breaker.reason
        assert "no such thing" in caplog.text
        monkeypatch.setattr(upstream, "get", answered)
        for _ in range(3):
            await watch.probe(with_models=True)
        assert node.healthy

    async def answered(*_arguments: object) -> tuple[int, bytes]:
        return 200, b'{"data": [{"id": "m"}]}'

    asyncio.run(run())


@contextmanager
def breaking_node() -> Iterator[tuple[str, Event]]:
    """A node that breaks off an answer to `break`, streams to `stream` until the event, and holds probes from then."""
    done, broke = Event(), Event()

    class Node(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if broke.is_set():
                done.wait(300)
            self.reply(b'{"data": [{"id": "m", "owned_by": "vllm"}]}')

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if b"stream" in body:
                self.reply(b"", "text/event-stream")
                while not done.wait(0.05):
                    self.wfile.write(b'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n')
            elif b"break" in body:
                broke.set()
                self.reply(b'{"id": "x", ', length=999)
                self.close_connection = True
            else:
                message = {"role": "assistant", "content": "hi"}
                choice = {"index": 0, "finish_reason": "stop", "message": message}
                self.reply(json.dumps({"id": "x", "choices": [choice]}).encode())

        def reply(self, body: bytes, kind: str = "application/json", length: int | None = None) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            if body:
                self.send_header("content-length", str(length or len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Keep the test's output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Node) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", done
        finally:
            done.set()
            server.shutdown()


def test_health_is_degraded_while_requests_use_the_last_resort(spawn: Any, tmp_path: Path) -> None:
    """A load balancer must not take out a gateway that still answers."""

    def ask(text: str, **fields: Any) -> dict[str, Any]:
        return {"json": {"model": "m", "messages": [{"role": "user", "content": text}], **fields}, "timeout": 60}

    with breaking_node() as (node, done):
        command = ["--node", node, "--no-auth", "--ledger", str(tmp_path / "usage.sqlite3"), "--exit-with-parent"]
        chat, url = "/v1/chat/completions", spawn("-m", "updraft", "gateway", "--port", "0", *command).url
        with (
            httpx.Client(base_url=url) as gateway,
            gateway.stream("POST", chat, **ask("stream", stream=True)) as stream,
        ):
            next(stream.iter_bytes())  # from now on, late probes say nothing about the node
            assert gateway.get("/health").json()["status"] == "ok"
            assert gateway.post(chat, **ask("break")).status_code >= 500
            health = gateway.get("/health")
            assert (health.status_code, health.json()["status"]) == (200, "degraded"), health.text
            assert health.json()["healthy_nodes"] == 0
            assert [each["id"] for each in gateway.get("/v1/models").json()["data"]] == ["m"]
            assert gateway.post(chat, **ask("hi")).status_code == 200
            done.set()
