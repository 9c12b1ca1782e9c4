"""Nodes with a limit and a key of their own: what is too much waits or is refused, and no answer is lost."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from updraft.cloud_engine.gateway.balancing.nodes_file import read_nodes
from updraft.cloud_engine.gateway.ledger.opening import open_reader
from updraft.cloud_engine.gateway.limits.accounting import AccountingOptions
from updraft.cloud_engine.gateway.process import GatewayOptions, _nodes
from updraft.protocol.errors import ConfigurationError

CAPACITY, WAITING = 4, 16
ASKED = 5 * (CAPACITY + WAITING)
BODY = {"model": "big", "messages": [{"role": "user", "content": "Hi"}]}


@dataclass
class Stub:
    """Answers when it may, and refuses whoever is one too many."""

    may_answer: threading.Event = field(default_factory=threading.Event)
    running: int = 0
    most: int = 0
    keys: Counter[str] = field(default_factory=Counter[str])

    def app(self) -> Starlette:
        chat = Route("/v1/chat/completions", self.chat, methods=["POST"])
        return Starlette(routes=[Route("/v1/models", self.models), chat])

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "big", "object": "model", "owned_by": "somebody"}]})

    async def chat(self, request: Request) -> Response:
        self.keys[request.headers.get("authorization", "")] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.to_thread(self.may_answer.wait)
        self.running -= 1
        usage = {"prompt_tokens": 1_000_000, "completion_tokens": 1_000_000}
        message = {"role": "assistant", "content": "Hi"}
        return JSONResponse({"choices": [{"index": 0, "message": message}], "usage": usage})


def start(spawn: Any, tmp_path: Path, *options: str) -> Any:
    db = ("--ledger", str(tmp_path / "usage.sqlite"))
    return spawn("-m", "updraft", "gateway", "--port", "0", "--no-auth", *db, *options, "--exit-with-parent")


def test_at_five_times_what_fits_all_that_fits_is_answered(spawn: Any, tmp_path: Path) -> None:
    stub = Stub()

    async def ask(client: httpx.AsyncClient, refused: asyncio.Semaphore) -> httpx.Response:
        response = await client.post("/v1/chat/completions", json=BODY)
        if response.status_code == 503:
            refused.release()
        return response

    async def run(url: str) -> list[httpx.Response]:
        refused = asyncio.Semaphore(0)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            tasks = [asyncio.create_task(ask(client, refused)) for _ in range(ASKED)]
            for _ in range(ASKED - CAPACITY - WAITING):
                await refused.acquire()  # while nothing is answered yet
            assert not stub.may_answer.is_set()
            stub.may_answer.set()
            return await asyncio.gather(*tasks)

    with serving(stub.app()) as url:
        limits = ("--max-concurrency-per-node", str(CAPACITY), "--max-waiting", str(WAITING))
        responses = asyncio.run(run(start(spawn, tmp_path, "--node", url, *limits).url))
    assert Counter(response.status_code for response in responses) == {
        200: CAPACITY + WAITING,
        503: ASKED - CAPACITY - WAITING,
    }
    assert stub.most == CAPACITY
    assert {response.headers["retry-after"] for response in responses if response.status_code == 503} == {"1"}


def test_a_file_gives_nodes_their_keys(spawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = [Stub(), Stub()]
    monkeypatch.setenv("FIRST_KEY", "first-secret")
    monkeypatch.setenv("UPDRAFT_NODE_API_KEY", "usual-secret")
    with serving(stubs[0].app()) as first, serving(stubs[1].app()) as second:
        lines = [
            f'[[nodes]]\nurl = "{first}"\napi_key_env = "FIRST_KEY"',
            f'[[nodes]]\nurl = "{second}"\nidle_timeout_s = 5',
        ]
        (tmp_path / "nodes.toml").write_text("\n".join(lines))
        gateway = start(spawn, tmp_path, "--nodes-file", str(tmp_path / "nodes.toml"))
        for stub in stubs:
            stub.may_answer.set()
        for _ in range(4):
            assert httpx.post(f"{gateway.url}/v1/chat/completions", json=BODY, timeout=60).status_code == 200
    assert [dict(stub.keys) for stub in stubs] == [{"Bearer first-secret": 2}, {"Bearer usual-secret": 2}]


def test_a_node_has_prices_of_its_own(spawn: Any, tmp_path: Path) -> None:
    stubs = [Stub(), Stub()]
    table = '[[prices]]\nmodel = "big"\ninput = 1\noutput = 2\n'
    (tmp_path / "prices.toml").write_text(table)
    with serving(stubs[0].app()) as first, serving(stubs[1].app()) as second:
        lines = [f'[[nodes]]\nurl = "{first}"\ninput = 10\noutput = 20', f'[[nodes]]\nurl = "{second}"']
        (tmp_path / "nodes.toml").write_text("\n".join(lines))
        files = ("--nodes-file", str(tmp_path / "nodes.toml"), "--prices", str(tmp_path / "prices.toml"))
        gateway = start(spawn, tmp_path, *files)
        for stub in stubs:
            stub.may_answer.set()
        for _ in range(4):
            httpx.post(f"{gateway.url}/v1/chat/completions", json=BODY, timeout=60).raise_for_status()
        httpx.get(f"{gateway.url}/admin/usage").raise_for_status()  # the rows are written
        with open_reader(tmp_path / "usage.sqlite").rows() as rows:
            assert {(row["node"], row["cost_usd"]) for row in rows} == {(first, 30.0), (second, 3.0)}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[[nodes]]\n", "url"),
        ('[[nodes]]\nurl = "http://h"\nkey = "secret"\n', "no setting `nodes\\[0\\].key`"),
        ('[[nodes]]\nurl = "http://h"\napi_key_env = "UPDRAFT_NO_SUCH_KEY"\n', "is not set"),
        ('[[nodes]]\nurl = "http://h"\nkey_env = "HOME"\n', "key_env` is now `api_key_env`"),
        ('[[nodes]]\nurl = "http://h"\nconcurrency = 5\n', "concurrency` is now `max_concurrency`"),
        ('[[nodes]]\nurl = "http://h"\nidle_s = 5\n', "idle_s` is now `idle_timeout_s`"),
        ('[[nodes]]\nurl = "http://h"\nmax_concurrency = 0\n', "above 0"),
        ('[[nodes]]\nurl = "http://h"\nidle_timeout_s = inf\n', "idle_timeout_s must be above 0 and finite"),
        ('[[nodes]]\nurl = "http://h"\noutput = 1\n', "must both be set"),
        ('[[nodes]]\nurl = "http://h"\ninput = -1\noutput = 1\n', "input"),
        ("nodes", "nodes-file"),
    ],
)
def test_a_faulty_file_is_refused_in_words(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "nodes.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=match) as caught:
        read_nodes(tmp_path / "nodes.toml", None)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_the_parts_of_workers_make_up_the_limit_of_a_node(workers: int) -> None:
    options = GatewayOptions(("http://h",), AccountingOptions("db"), max_concurrency_per_node=10, workers=workers)
    parts = [_nodes(options, worker)[0].concurrency or 0 for worker in range(workers)]
    assert sum(parts) == 10
    assert min(parts) >= 1


def test_a_node_with_less_capacity_than_workers_is_refused() -> None:
    options = GatewayOptions(("http://h",), AccountingOptions("db"), max_concurrency_per_node=3, workers=4)
    with pytest.raises(ConfigurationError, match="fewer workers"):
        _nodes(options, 0)
