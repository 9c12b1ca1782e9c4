"""Whole answers that their client does not read take bounded memory, and lock nobody out."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
from gateway_keys import make_key
from raw_http import post
from server_processes import running
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from waiting import wait_for

CHAT = "/v1/chat/completions"
ANSWER_BYTES = 16 * 2**20
CONNECTIONS = 20
MOST_BYTES = 192 * 2**20  # 64 MiB, and copies of the answers that arrive


async def _models(_request: Request) -> Response:
    return JSONResponse({"data": [{"id": "big"}]})


async def _chat(request: Request) -> Response:
    text = "a" * (ANSWER_BYTES if "long" in (await request.body()).decode() else 1)
    return JSONResponse({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})


def _asked(text: str) -> dict[str, object]:
    return {"model": "big", "messages": [{"role": "user", "content": text}]}


def test_unread_answers_take_the_memory_of_one_tenant(tmp_path: Path) -> None:
    reckless, other = (make_key(tmp_path / "keys", name) for name in ("reckless", "other"))
    node = Starlette(routes=[Route("/v1/models", _models), Route(CHAT, _chat, methods=["POST"])])
    command = (
        "-m",
        "updraft",
        "gateway",
        "--port",
        "0",
        "--keys",
        str(tmp_path / "keys"),
        "--db",
        str(tmp_path / "db"),
    )
    with (
        serving(node) as url,
        running(*command, "--node", url, "--exit-with-parent") as gateway,
        ExitStack() as stack,
    ):
        address, process = urlsplit(gateway.url), psutil.Process(gateway.popen.pid)

        def status(text: str) -> int:
            headers = {"authorization": f"Bearer {other}"}
            return httpx.post(gateway.url + CHAT, json=_asked(text), headers=headers, timeout=60).status_code

        assert status("long") == 200
        before = process.memory_info().rss
        clients = [socket.socket() for _ in range(CONNECTIONS)]
        for client in clients:
            stack.enter_context(client)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60)
            client.connect((address.hostname, address.port))
            client.sendall(post(CHAT, json.dumps(_asked("long")).encode(), f"authorization: Bearer {reckless}"))
        statuses = [client.recv(12)[9:] for client in clients]
        assert statuses.count(b"429") >= CONNECTIONS // 2
        assert process.memory_info().rss - before < MOST_BYTES
        assert [status("short"), status("long")] == [200, 200]
    wait_for(lambda: not process.is_running())
