"""Answers that their client does not read, whole or streamed, take bounded memory, and lock nobody out."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from gateway_keys import make_key
from raw_http import post
from server_processes import running
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from waiting import wait_for

CHAT = "/v1/chat/completions"
ANSWER_BYTES = 16 * 2**20
CONNECTIONS = 20
MOST_BYTES = 192 * 2**20  # 64 MiB, and copies of the answers that arrive
EVENT_BYTES = 3 * 2**20
STREAMS = 60


async def _models(_request: Request) -> Response:
    return JSONResponse({"data": [{"id": "big"}]})


async def _events() -> AsyncGenerator[bytes]:
    choice = {"index": 0, "delta": {"content": "a" * EVENT_BYTES}, "finish_reason": None}
    event = b"data: %b\n\n" % json.dumps({"id": "a", "choices": [choice]}).encode()
    for _ in range(4):
        yield event
    yield b"data: [DONE]\n\n"


async def _chat(request: Request) -> Response:
    if json.loads(await request.body()).get("stream"):
        return StreamingResponse(_events(), media_type="text/event-stream")
    text = "a" * (ANSWER_BYTES if "long" in (await request.body()).decode() else 1)
    return JSONResponse({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})


def _asked(text: str) -> dict[str, object]:
    return {"model": "big", "messages": [{"role": "user", "content": text}]}


@contextmanager
def _gateway(folder: Path) -> Iterator[Any]:
    node = Starlette(routes=[Route("/v1/models", _models), Route(CHAT, _chat, methods=["POST"])])
    command = (
        "-m",
        "updraft",
        "gateway",
        "--port",
        "0",
        "--keys",
        str(folder / "keys"),
        "--ledger",
        str(folder / "db"),
    )
    with serving(node) as url, running(*command, "--node", url, "--exit-with-parent") as gateway:
        yield gateway


def _unread(gateway: Any, stack: ExitStack, key: str, count: int, **fields: Any) -> list[socket.socket]:
    """Clients of a request each, which do not read."""
    address = urlsplit(gateway.url)
    clients = [stack.enter_context(socket.socket()) for _ in range(count)]
    for client in clients:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(60)
        client.connect((address.hostname, address.port))
        body = json.dumps({**_asked("long"), **fields}).encode()
        client.sendall(post(CHAT, body, f"authorization: Bearer {key}"))
    return clients


def test_unread_streams_take_the_memory_of_one_tenant(tmp_path: Path) -> None:
    reckless, other = (make_key(tmp_path / "keys", name) for name in ("reckless", "other"))
    with _gateway(tmp_path) as gateway, ExitStack() as stack:
        process = psutil.Process(gateway.popen.pid)
        body = {**_asked("long"), "stream": True}
        whole = httpx.post(gateway.url + CHAT, json=body, headers={"authorization": f"Bearer {other}"}, timeout=60)
        assert whole.text.count("a" * EVENT_BYTES) == 4, "one stream of large events is relayed"
        before = process.memory_info().rss
        clients = _unread(gateway, stack, reckless, STREAMS, stream=True)
        answers = [client.recv(12)[9:] for client in clients]
        assert process.memory_info().rss - before < MOST_BYTES
        small = httpx.post(
            gateway.url + CHAT, json=_asked("short"), headers={"authorization": f"Bearer {other}"}, timeout=60
        )
        assert small.status_code == 200
        assert b"429" in answers, "the memory of the tenant is full"
        ended = bytearray()
        while piece := clients[answers.index(b"200")].recv(2**20):
            ended = ended[-2000:] + piece
        assert b"[DONE]" in ended[-2000:] or b"body_memory_exceeded" in ended[-2000:]


def test_unread_answers_take_the_memory_of_one_tenant(tmp_path: Path) -> None:
    reckless, other = (make_key(tmp_path / "keys", name) for name in ("reckless", "other"))
    with _gateway(tmp_path) as gateway, ExitStack() as stack:
        process = psutil.Process(gateway.popen.pid)

        def status(text: str) -> int:
            headers = {"authorization": f"Bearer {other}"}
            return httpx.post(gateway.url + CHAT, json=_asked(text), headers=headers, timeout=60).status_code

        assert status("long") == 200
        before = process.memory_info().rss
        clients = _unread(gateway, stack, reckless, CONNECTIONS)
        statuses = [client.recv(12)[9:] for client in clients]
        assert statuses.count(b"429") >= CONNECTIONS // 2
        assert process.memory_info().rss - before < MOST_BYTES
        assert [status("short"), status("long")] == [200, 200]
    wait_for(lambda: not process.is_running())
