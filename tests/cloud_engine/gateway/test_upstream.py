"""The pool of connections to nodes, against servers on real sockets: reused, bounded, and closed when left."""

from __future__ import annotations

import asyncio
import errno
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from updraft.cloud_engine.gateway.upstream import client
from updraft.cloud_engine.gateway.upstream.client import Upstream, UpstreamAddress, UpstreamRequest
from updraft.cloud_engine.gateway.upstream.connection import SilenceTimeouts
from updraft.cloud_engine.gateway.upstream.failures import UnreachableError, UpstreamFailure, UpstreamTimeout
from updraft.cloud_engine.gateway.upstream.pool import PoolLimits
from updraft.protocol.errors import InvalidRequestError

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Counts its connections and hands each to a handler."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.connections = 0
        self.target = UpstreamAddress(b"http", b"127.0.0.1", 0, b"")

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(handler: Handler) -> AsyncGenerator[Server]:
    server = Server(handler)
    listening = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.target = UpstreamAddress(b"http", b"127.0.0.1", listening.sockets[0].getsockname()[1], b"")
    try:
        yield server
    finally:
        listening.close()


async def ask(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def always_ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await ask(reader)
        writer.write(OK)


def test_connections_are_used_again_and_send_at_once() -> None:
    async def run() -> None:
        async with serving(always_ok) as server:
            upstream = Upstream(None)
            for _ in range(5):
                assert await upstream.get(server.target, b"/") == (200, b"ok")
            assert server.connections == 1
            async with upstream.open(server.target, UpstreamRequest(b"GET", b"/")) as response:
                transport = response._connection._transport
                option = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert option, "Nagle's algorithm would wait for acknowledgements"
                await response.read_whole()
            await upstream.close()

    asyncio.run(run())


def test_a_thousand_requests_wait_together_and_the_pool_bounds_them() -> None:
    waiting, most, everybody = 0, 0, asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal waiting, most
        while True:
            await ask(reader)
            waiting += 1
            most = max(most, waiting)
            if waiting == 100:
                everybody.set()
            await everybody.wait()
            waiting -= 1
            writer.write(OK)

    async def run() -> None:
        async with serving(slow) as server:
            upstream = Upstream(None, PoolLimits(connections=100, connect_s=60))
            answers = await asyncio.gather(*(upstream.get(server.target, b"/") for _ in range(1000)))
            assert answers == [(200, b"ok")] * 1000
            assert server.connections == most == 100
            await upstream.close()

    asyncio.run(run())


def test_a_connection_that_is_reset_at_once_is_a_failure_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio then knows no name of the peer. Another error would end the watch of the node for good."""

    def reset(_socket: socket.socket) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    async def run() -> None:
        async with serving(always_ok) as server:
            monkeypatch.setattr(socket.socket, "getpeername", reset)
            upstream = Upstream(None)
            with pytest.raises(UnreachableError, match="was reset"):
                await upstream.get(server.target, b"/")
            await upstream.close()

    asyncio.run(run())


def test_a_connection_that_the_node_closed_at_rest_costs_no_request() -> None:
    async def one_each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ask(reader)
        writer.write(OK)
        await ask(reader)  # and is gone, with the request

    async def run() -> None:
        async with serving(one_each) as server:
            upstream = Upstream(None)
            for _ in range(3):
                assert await upstream.get(server.target, b"/") == (200, b"ok")
            assert server.connections == 3
            await upstream.close()

    asyncio.run(run())


def test_a_node_that_closes_a_new_connection_is_asked_once() -> None:
    async def closes(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await ask(reader)

    async def run() -> None:
        async with serving(closes) as server:
            with pytest.raises(UpstreamFailure):
                await Upstream(None).get(server.target, b"/")
            assert server.connections == 1

    asyncio.run(run())


def test_an_answer_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 100_000)

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ask(reader)
        writer.write(CHUNKED)
        while True:
            writer.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            await writer.drain()

    async def run() -> None:
        async with serving(endless) as server:
            with pytest.raises(UpstreamFailure, match="longer than 100000 bytes"):
                await Upstream(None).get(server.target, b"/")

    asyncio.run(run())


def test_a_client_that_reads_slowly_holds_the_node_back() -> None:
    sent = 0

    async def fast(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await ask(reader)
        writer.write(CHUNKED)
        while True:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            sent += 65536

    async def run() -> None:
        async with serving(fast) as server, Upstream(None).open(server.target, UpstreamRequest(b"GET", b"/")) as answer:
            before = -1
            while before != sent:  # until the node may not send any more
                before = sent
                await asyncio.sleep(0.3)
            assert len(await answer.read()) < 2**20
            assert sent < 64 * 2**20, "kept in the kernel's buffers, not in this process"

    asyncio.run(run())


@pytest.mark.parametrize("begun", [b"", CHUNKED, CHUNKED + b"5\r\nhello\r\n"])
def test_silence_ends_at_its_timeout(begun: bytes) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ask(reader)
        writer.write(begun)
        await reader.read()

    async def run() -> None:
        timeouts = SilenceTimeouts(first_s=0.2, idle_s=0.2)
        async with serving(silent) as server:
            with pytest.raises(UpstreamTimeout):
                async with Upstream(None).open(server.target, UpstreamRequest(b"GET", b"/"), timeouts) as answer:
                    await answer.read_whole()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_signs_of_life_keep_a_stream_beyond_its_idle_timeout() -> None:
    async def lively(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ask(reader)
        writer.write(CHUNKED)
        for _ in range(10):
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.2)
        writer.write(b"0\r\n\r\n")

    async def run() -> None:
        request, timeouts = UpstreamRequest(b"GET", b"/"), SilenceTimeouts(first_s=1.5, idle_s=1.5)
        async with serving(lively) as server, Upstream(None).open(server.target, request, timeouts) as answer:
            assert await answer.read_whole() == b"x" * 10

    asyncio.run(run())


def test_cancelled_request_closes_the_connection_at_once() -> None:
    closed = asyncio.Event()

    async def waits(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await ask(reader)
        try:
            await reader.read()
        finally:
            closed.set()

    async def run() -> None:
        async with serving(waits) as server:
            asking = asyncio.create_task(Upstream(None).get(server.target, b"/"))
            await asyncio.sleep(0.2)
            asking.cancel()
            await asyncio.wait_for(closed.wait(), 60)

    asyncio.run(run())


def test_no_answer_from_a_port_and_no_bytes_that_split_a_request() -> None:
    async def run() -> None:
        upstream = Upstream(None)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        with pytest.raises(UpstreamFailure):
            await upstream.get(UpstreamAddress(b"http", b"127.0.0.1", port, b""), b"/")
        target = UpstreamAddress(b"http", b"127.0.0.1", port, b"")
        for request in (
            UpstreamRequest(b"GET", b"/a b"),
            UpstreamRequest(b"GET", b"/\r\nx: y"),
            UpstreamRequest(b"GET", b"/", headers=[(b"x", b"a\r\nb: c")]),
        ):
            with pytest.raises(InvalidRequestError):
                async with upstream.open(target, request):
                    pass

    asyncio.run(run())


def test_connecting_takes_its_time_again_if_the_gateway_itself_was_stalled() -> None:
    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ask(reader)
        writer.write(OK)

    async def run() -> None:
        async with serving(answers) as server:
            upstream = Upstream(None, PoolLimits(connect_s=0.1))
            asking = asyncio.create_task(upstream.get(server.target, b"/"))
            asyncio.get_running_loop().call_soon(time.sleep, 0.8)  # after the connection has begun
            assert await asking == (200, b"ok")
            await upstream.close()

    asyncio.run(run())


def test_an_answer_to_nothing_ends_the_connection() -> None:
    async def chatty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ask(reader)
        writer.write(OK)
        await asyncio.sleep(0.2)
        writer.write(OK)
        await reader.read()

    async def run() -> None:
        async with serving(chatty) as server:
            upstream = Upstream(None)
            await upstream.get(server.target, b"/")
            await asyncio.sleep(0.6)
            await upstream.get(server.target, b"/")
            assert server.connections == 2
            await upstream.close()

    asyncio.run(run())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
def test_a_node_behind_tls_needs_a_certificate_that_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=node"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    server = Server(always_ok)

    async def run() -> None:
        listening = await asyncio.start_server(server.accept, "127.0.0.1", 0, ssl=context)
        target = UpstreamAddress(b"https", b"127.0.0.1", listening.sockets[0].getsockname()[1], b"")
        with pytest.raises(UpstreamFailure, match="CERTIFICATE_VERIFY_FAILED"):
            await Upstream(None).get(target, b"/")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
        upstream = Upstream(None, PoolLimits(connect_s=30))
        for _ in range(2):
            assert await upstream.get(target, b"/") == (200, b"ok")
        assert server.connections == 1, "those that were not trusted sent nothing"
        await upstream.close()
        listening.close()

    asyncio.run(run())


def test_a_connection_on_which_a_request_is_still_going_out_is_not_used_again() -> None:
    never = asyncio.Event()  # held here: only the handler's own cycle would hold it otherwise, and be collected

    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ask(reader)
        writer.write(OK)
        await never.wait()  # and reads no more

    async def run() -> None:
        async with serving(hasty) as server:
            upstream = Upstream(None)
            request = UpstreamRequest(b"POST", b"/", b"x" * 2**26)  # more than the kernel's buffers hold
            for _ in range(2):
                async with upstream.open(server.target, request) as answer:
                    assert await answer.read_whole() == b"ok"
            assert server.connections == 2

    asyncio.run(run())
