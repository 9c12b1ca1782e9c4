"""A node is out when it refuses or is silent for long, and not when it is late while its streams go on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from updraft.cloud_engine.gateway.balancing import health
from updraft.cloud_engine.gateway.balancing.health import HealthWatch, ProbeTimeout
from updraft.cloud_engine.gateway.balancing.node import Node, NodeAddress
from updraft.cloud_engine.gateway.upstream.client import Upstream, UpstreamRequest
from updraft.cloud_engine.gateway.upstream.pool import PoolLimits

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_MIN_TIMEOUT_S", 0.1)


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
