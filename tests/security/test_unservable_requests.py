"""A request that no node can serve costs its sender an error, and takes no node away from the others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from serving import serving
from updraft.cloud_engine.gateway.limits.accounting import AccountingOptions
from updraft.cloud_engine.gateway.process import GatewayOptions, open_gateway
from updraft.cloud_engine.gateway.upstream import client

MODELS = b'{"object":"list","data":[{"id":"big","object":"model","owned_by":"somebody"}]}'
ANSWER = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"Hi"}}]}'
LONG = 200_000


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """It reads no large body, as many servers, and writes what a request with `n` and log-probabilities asks for."""
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            if length > 1_000_000:
                writer.transport.abort()
                return
            body = await reader.readexactly(length)
            shown = MODELS if head.startswith(b"GET") else ANSWER + b" " * (LONG if b"logprobs" in body else 0)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(shown), shown))
    except (ConnectionError, asyncio.IncompleteReadError):
        writer.close()


@contextmanager
def node() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.close()


def test_the_nodes_stay_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", LONG // 2)
    chat = {"model": "big", "messages": [{"role": "user", "content": "Hi"}]}
    with node() as first, node() as second:
        options = GatewayOptions([first, second], AccountingOptions(str(tmp_path / "usage")), no_auth=True)
        with serving(open_gateway(options), lifespan=True) as url, httpx.Client(base_url=url, timeout=60) as asking:
            for harm, status in (({"user": "x" * 5_000_000}, 503), ({"logprobs": True, "n": 128}, 502)):
                refused = asking.post("/v1/chat/completions", json={**chat, **harm})
                assert refused.status_code == status, refused.text
                assert asking.get("/health").json()["healthy_nodes"] == 2
                assert asking.post("/v1/chat/completions", json=chat).status_code == 200
