"""Asks every endpoint a private question, in a process that notes each socket; for `test_no_sockets.py`.

Then it asks each something that is not private, which must be seen: a check that sees nothing shows nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "support")]

from private_requests import OPENED, SECRET, watch_sockets
from route_requests import QUESTIONS, WireRequest, question
from starlette.testclient import TestClient
from updraft.protocol.errors import EngineError
from updraft.router.config import RouterConfig
from updraft.router.factory import load_tiers
from updraft.router.privacy.rules import Privacy
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from updraft.router.server.endpoints import Endpoints

OVER = ("completed", "failed", "cancelled", "expired", "incomplete")
BATCHED = ("/v1/embeddings", "/v1/responses")
Ask = Callable[[Endpoints, str], Awaitable[str]]


async def read(endpoints: Endpoints, request: WireRequest) -> tuple[int, bytes]:
    response = await endpoints.handle(request)
    body = response.body
    return response.status, body if isinstance(body, bytes) else b"".join([chunk async for chunk in body])


def plain(path: str, *, stream: bool) -> Ask:
    async def ask(endpoints: Endpoints, text: str) -> str:
        more = {} if path.startswith("/api/embed") else {"stream": stream}
        status, body = await read(endpoints, question(path, text, **more))
        return f"{status} {'private' if b'private' in body else ''}"

    return ask


async def gone_on_with(endpoints: Endpoints, text: str) -> str:
    status, body = await read(endpoints, question("/v1/responses", text, store=True))
    if status != 200:
        return str(status)
    before = json.loads(body)["id"]
    status, _ = await read(endpoints, question("/v1/responses", "and why?", previous_response_id=before))
    return str(status)


async def over(endpoints: Endpoints, path: str, status: str) -> dict[str, Any]:
    """The response or batch at its end, or at its first socket."""
    state = {"status": status}
    while state["status"] not in OVER and not OPENED:
        await asyncio.sleep(0.02)
        state = json.loads((await read(endpoints, WireRequest("GET", path)))[1])
    return state


async def in_the_background(endpoints: Endpoints, text: str) -> str:
    _, body = await read(endpoints, question("/v1/responses", text, store=True, background=True))
    begun = json.loads(body)
    return (await over(endpoints, f"/v1/responses/{begun['id']}", begun["status"]))["status"]


async def in_a_batch(endpoints: Endpoints, text: str, path: str) -> str:
    line = {"custom_id": "1", "method": "POST", "url": path, "body": json.loads(question(path, text).body)}
    parts = {'"purpose"': "batch", '"file"; filename="a.jsonl"': json.dumps(line)}
    form = "".join(
        f"--b\r\ncontent-disposition: form-data; name={name}\r\n\r\n{part}\r\n" for name, part in parts.items()
    )
    headers = {"content-type": "multipart/form-data; boundary=b"}
    _, body = await read(endpoints, WireRequest("POST", "/v1/files", headers, f"{form}--b--\r\n".encode()))
    asked = {"input_file_id": json.loads(body)["id"], "endpoint": path, "completion_window": "24h"}
    _, body = await read(endpoints, WireRequest("POST", "/v1/batches", {}, json.dumps(asked).encode()))
    batch = await over(endpoints, f"/v1/batches/{json.loads(body)['id']}", "validating")
    return f"{batch['status']} {batch.get('request_counts')}"


async def over_a_socket(endpoints: Endpoints, text: str) -> str:
    def chat() -> str:
        app = daemon_app(Router(endpoints.router.config))
        with TestClient(app, "http://127.0.0.1:4114") as client, client.websocket_connect("/v1/chat/ws") as socket:
            socket.send_json({"id": "a", **json.loads(question("/v1/chat/completions", text).body)})
            return str(socket.receive_json()["type"])

    return await asyncio.to_thread(chat)


ASK: dict[str, Ask] = {
    **{f"{path}, {'streamed' if stream else 'whole'}": plain(path, stream=stream)
       for path in QUESTIONS for stream in (False, True)},
    **{f"a batch of {path}": lambda endpoints, text, path=path: in_a_batch(endpoints, text, path) for path in BATCHED},
    "a response in the background": in_the_background,
    "a response that is gone on with": gone_on_with,
    "a chat over a WebSocket": over_a_socket,
}  # fmt: skip


def config(**settings: Any) -> RouterConfig:
    folder = Path(tempfile.mkdtemp())
    kept = {"store": folder / "answers.sqlite3", "files": folder / "files"}
    cloud = {"cloud_url": "http://127.0.0.1:9", "cloud_model": "big"}
    return RouterConfig(**kept, **cloud, privacy=Privacy(builtin=("credit_card",)), **settings)


async def fails(*_: Any, **__: Any) -> Any:
    raise EngineError("the device failed")


async def main() -> None:
    watch_sockets()
    with_device = config(local="pocket", confidence=0.999)
    failing = await load_tiers(with_device)
    assert failing.local is not None
    failing.local.start = failing.local.start_text = fails  # type: ignore[method-assign]
    for name, router in {
        "device": Router(with_device),
        "device fails": Router(with_device, failing),
        "no device": Router(config(local=None)),
    }.items():
        endpoints = Endpoints(router)
        for what, ask in ASK.items():
            print(f"{name}, {what}: {await ask(endpoints, SECRET)}", *(f"SOCKET {event}" for event in OPENED))
        await endpoints.close()
    for what, ask in ASK.items():
        endpoints = Endpoints(Router(config(local=None)))  # no breaker is open
        OPENED.clear()
        asking = asyncio.ensure_future(ask(endpoints, "hello"))
        while not (OPENED or asking.done()):
            await asyncio.wait([asking], timeout=0.01)
        asking.cancel()  # it would be tried again
        await asyncio.wait([asking])
        print(f"not private, {what}: {'seen' if OPENED else 'MISSED'}")
        await endpoints.close()


asyncio.run(main())
