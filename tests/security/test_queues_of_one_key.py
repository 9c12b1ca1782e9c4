"""A busy key does not lock out other keys: queue places and turns are shared fairly between tenants."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from gateway_keys import make_key
from server_processes import running
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

BUSY, OTHERS, PLACES = 300, 20, 256


@dataclass
class SlowNode:
    """Answers one request for each `turn`."""

    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    answered: list[str] = field(default_factory=list[str])
    loop: asyncio.AbstractEventLoop | None = None

    def app(self) -> Starlette:
        chat = Route("/v1/chat/completions", self.chat, methods=["POST"])
        return Starlette(routes=[Route("/v1/models", self.models), chat])

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "big", "object": "model", "owned_by": "somebody"}]})

    async def chat(self, request: Request) -> Response:
        self.loop = asyncio.get_running_loop()
        said = (await request.json())["messages"][0]["content"]
        await self.turns.acquire()
        self.answered.append(said)
        return JSONResponse({"choices": [{"index": 0, "message": {"role": "assistant", "content": said}}]})

    def give_turns(self, count: int) -> None:
        assert self.loop is not None
        for _ in range(count):
            self.loop.call_soon_threadsafe(self.turns.release)


def test_a_busy_key_shares_turns_equally_with_another_key(tmp_path: Path) -> None:
    keys = {name: make_key(tmp_path / "keys", name) for name in ("busy", "other")}
    node, refused = SlowNode(), asyncio.Queue[str]()

    async def ask(client: httpx.AsyncClient, name: str) -> int:
        body = {"model": "big", "messages": [{"role": "user", "content": name}]}
        headers = {"authorization": f"Bearer {keys[name]}"}
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        if answer.status_code == 503:
            refused.put_nowait(name)
        return answer.status_code

    async def run(url: str) -> tuple[Counter[int], list[int]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:
            busy = [asyncio.create_task(ask(client, "busy")) for _ in range(BUSY)]
            for _ in range(BUSY - PLACES - 1):
                await refused.get()  # the queue is full
            others = [asyncio.create_task(ask(client, "other")) for _ in range(OTHERS)]
            evicted = [await refused.get() for _ in range(OTHERS)]  # each newcomer evicts a request of the busy key
            assert set(evicted) == {"busy"}
            node.give_turns(2 * OTHERS + 2)
            statuses = await asyncio.gather(*others)
            node.give_turns(BUSY)
            return Counter(await asyncio.gather(*busy)), statuses

    command = ("-m", "updraft", "gateway", "--port", "0", "--keys", str(tmp_path / "keys"), "--exit-with-parent")
    options = ("--ledger", str(tmp_path / "db"), "--max-concurrency-per-node", "1", "--max-waiting", str(PLACES))
    with serving(node.app()) as url, running(*command, *options, "--node", url) as gateway:
        busy, others = asyncio.run(run(gateway.url))
    assert others == [200] * OTHERS
    assert node.answered[: 2 * OTHERS + 2].count("other") == OTHERS
    assert busy == {200: PLACES + 1 - OTHERS, 503: BUSY - PLACES - 1 + OTHERS}
