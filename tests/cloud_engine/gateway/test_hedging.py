"""Hedging: a second node gets a request too that the first is silent on. One is relayed, the other is left at once."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from gateway_keys import make_key
from prometheus_client.parser import text_string_to_metric_families
from serving import serving
from starlette.types import Receive, Scope, Send
from updraft.cloud_engine.gateway.balancing.affinity import Placement
from updraft.cloud_engine.gateway.balancing.node import Model, NodeAddress
from updraft.cloud_engine.gateway.balancing.registry import NodeRegistry
from updraft.cloud_engine.gateway.upstream.client import Upstream
from waiting import wait_for

CHAT, SPEECH_TO_TEXT = "/v1/chat/completions", "/v1/audio/transcriptions"
WORDS = ["one ", "two ", "three ", "four"]
BODY = {"model": "big", "messages": [{"role": "user", "content": "Count"}], "max_tokens": 100}
USAGE = {"prompt_tokens": 7, "completion_tokens": len(WORDS), "total_tokens": 11}
LATE_S = 0.3  # six times as long as the gateway waits
Behaviour = Callable[["Nodes", Receive, Send], Coroutine[None, None, None]]


@dataclass
class Nodes:
    """Two servers like vLLM. They behave as the script says to one request after the other, whichever has it."""

    script: deque[Behaviour] = field(default_factory=deque[Behaviour])
    # The node that was asked, and for what.
    asked: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    # Two were asked.
    both: threading.Event = field(default_factory=threading.Event)
    # The gateway has left a silent node.
    left: threading.Event = field(default_factory=threading.Event)
    num_left: int = 0
    # Nodes that wait may go on.
    released: threading.Event = field(default_factory=threading.Event)

    def will(self, *behaviours: Behaviour) -> None:
        self.script, self.asked, self.num_left = deque(behaviours), [], 0
        for each in (self.both, self.left, self.released):
            each.clear()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in (CHAT, SPEECH_TO_TEXT):
            is_listing = scope["path"] == "/v1/models"
            listed = {"object": "list", "data": [{"id": "big", "object": "model", "owned_by": "vllm"}]}
            await start(send, 200 if is_listing else 404)
            await send({"type": "http.response.body", "body": json.dumps(listed).encode()})
            return
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        self.asked.append((f"http://127.0.0.1:{scope['server'][1]}", body + message["body"]))
        if len(self.asked) > 1:
            self.both.set()
        await self.script.popleft()(self, receive, send)


async def start(send: Send, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})


async def until(event: threading.Event) -> None:
    await asyncio.to_thread(event.wait, 60)


async def silent(nodes: Nodes, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    nodes.num_left += 1
    nodes.left.set()


async def silent_behind_its_head(nodes: Nodes, receive: Receive, send: Send) -> None:
    await start(send)
    await silent(nodes, receive, send)


def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "big"}
    return f"data: {json.dumps({**head, 'choices': choices, **more})}\n\n".encode()


async def words(send: Send, some: list[str]) -> None:
    for word in some:
        data = event([{"index": 0, "delta": {"content": word}, "finish_reason": None}])
        await send({"type": "http.response.body", "body": data, "more_body": True})


async def streams(nodes: Nodes, receive: Receive, send: Send, said: int = 0) -> None:
    """It ends only once the gateway has left the other node."""
    await start(send)
    await words(send, WORDS[said:])
    await until(nodes.left)
    usage = {**USAGE, "prompt_tokens": 7 + said, "completion_tokens": len(WORDS) - said}
    end = event([{"index": 0, "delta": {}, "finish_reason": "stop"}]) + event([], usage=usage) + b"data: [DONE]\n\n"
    await send({"type": "http.response.body", "body": end})


async def goes_on(nodes: Nodes, receive: Receive, send: Send) -> None:
    await streams(nodes, receive, send, said=2)


async def breaks_off(nodes: Nodes, receive: Receive, send: Send) -> None:
    await start(send)
    await words(send, WORDS[:2])
    await until(nodes.left)
    raise ConnectionError("as if it were killed")


async def streams_when_another_is_asked(nodes: Nodes, receive: Receive, send: Send) -> None:
    await until(nodes.both)
    await streams(nodes, receive, send)


async def streams_when_released(nodes: Nodes, receive: Receive, send: Send) -> None:
    await until(nodes.released)
    nodes.left.set()
    await streams(nodes, receive, send)


async def dies_when_another_is_asked(nodes: Nodes, receive: Receive, send: Send) -> None:
    await until(nodes.both)
    await start(send)
    raise ConnectionError("as if it were killed")


async def is_full_when_another_is_asked(nodes: Nodes, receive: Receive, send: Send) -> None:
    await until(nodes.both)
    await start(send, 503)
    await send({"type": "http.response.body", "body": b"{}"})


def refuses(status: int, *, when_another_is_asked: bool = False) -> Behaviour:
    async def refuses(nodes: Nodes, receive: Receive, send: Send) -> None:
        if when_another_is_asked:
            await until(nodes.both)
        await start(send, status)
        await send({"type": "http.response.body", "body": b'{"error": {"message": "No."}}'})

    return refuses


async def dies_when_released(nodes: Nodes, receive: Receive, send: Send) -> None:
    await until(nodes.released)
    await start(send)
    raise ConnectionError("as if it were killed")


async def answers(nodes: Nodes, receive: Receive, send: Send) -> None:
    message = {"role": "assistant", "content": "".join(WORDS)}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    await start(send)
    whole = json.dumps({"id": "c", "object": "chat.completion", "choices": choices, "usage": USAGE})
    await send({"type": "http.response.body", "body": whole.encode()})


async def answers_late(nodes: Nodes, receive: Receive, send: Send) -> None:
    await asyncio.sleep(LATE_S)
    await answers(nodes, receive, send)


@dataclass
class Gateway:
    url: str
    folder: Path
    key: str
    batch_key: str

    def ask(self, *, batch: bool = False, stream: bool = True) -> str:
        """The text of the answer."""
        headers = {"authorization": f"Bearer {self.batch_key if batch else self.key}"}
        answer = httpx.post(f"{self.url}{CHAT}", json={**BODY, "stream": stream}, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        if not stream:
            return answer.json()["choices"][0]["message"]["content"]
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers={"authorization": f"Bearer {self.key}"}, timeout=60)

    def last_row(self) -> dict[str, Any]:
        self.get("/admin/usage").raise_for_status()
        with closing(sqlite3.connect(self.folder / "usage")) as connection:
            connection.row_factory = sqlite3.Row
            return dict(connection.execute("SELECT * FROM usage ORDER BY id DESC LIMIT 1").fetchone())

    def metrics(self) -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(self.get("/metrics").text)
        return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}

    def hedges(self, outcome: str) -> float:
        return self.metrics().get(("updraft_gateway_hedges_total", outcome), 0)

    def trips(self) -> float:
        return sum(value for name, value in self.metrics().items() if name[0].endswith("breaker_trips_total"))

    def in_flight(self) -> dict[str, int]:
        return {node["url"]: node["in_flight"] for node in self.get("/admin/nodes").json()["nodes"]}

    def is_idle(self) -> bool:
        """Both nodes are in, and have nothing to do."""
        return self.get("/health").json()["healthy_nodes"] == 2 and not any(self.in_flight().values())


@pytest.fixture(scope="module")
def nodes() -> Nodes:
    return Nodes()


@pytest.fixture(scope="module")
def open_gateway(nodes: Nodes, spawned: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts a gateway before both nodes."""
    with serving(nodes) as first, serving(nodes) as second:

        def open_gateway(*options: str) -> Any:
            return spawned("-m", "updraft", "gateway", "--port", "0", "--node", first, "--node", second, *options)

        yield open_gateway


@pytest.fixture(scope="module")
def running(open_gateway: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    key = make_key(folder / "keys", "interactive", "inference", "usage", "admin")
    batch_key = make_key(folder / "keys", "batch", priority="batch")
    files = ("--keys", str(folder / "keys"), "--ledger", str(folder / "usage"))
    with open_gateway("--hedge-after-s", "0.05", "--exit-with-parent", *files) as process:
        yield Gateway(process.url, folder, key, batch_key)


@pytest.fixture
def gateway(running: Gateway) -> Iterator[Gateway]:
    wait_for(running.is_idle)
    yield running
    wait_for(running.is_idle)


@pytest.mark.parametrize("first", [silent, silent_behind_its_head])
def test_the_second_node_answers_and_the_first_is_left(gateway: Gateway, nodes: Nodes, first: Behaviour) -> None:
    before = gateway.hedges("won"), gateway.trips()
    nodes.will(first, streams)
    assert gateway.ask() == "".join(WORDS)
    row, (one, two) = gateway.last_row(), [node for node, _ in nodes.asked]
    assert one != two
    assert (row["node"], row["retries"], row["status"]) == (two, 0, 200)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (7, len(WORDS))
    assert (gateway.hedges("won"), gateway.trips()) == (before[0] + 1, before[1])


def test_a_whole_answer_is_hedged_too(gateway: Gateway, nodes: Nodes) -> None:
    nodes.will(silent, answers)
    assert gateway.ask(stream=False) == "".join(WORDS)
    wait_for(nodes.left.is_set)
    row = gateway.last_row()
    assert (row["node"], row["completion_tokens"]) == (nodes.asked[1][0], len(WORDS))


def test_the_first_node_may_still_be_the_first_to_send(gateway: Gateway, nodes: Nodes) -> None:
    before = gateway.hedges("lost")
    nodes.will(streams_when_another_is_asked, silent)
    assert gateway.ask() == "".join(WORDS)
    row = gateway.last_row()
    assert (row["node"], row["retries"], row["completion_tokens"]) == (nodes.asked[0][0], 0, len(WORDS))
    assert gateway.hedges("lost") == before + 1


def test_a_client_that_leaves_takes_both_attempts_along(gateway: Gateway, nodes: Nodes) -> None:
    nodes.will(silent, silent)
    address, body = urlsplit(gateway.url), json.dumps({**BODY, "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {gateway.key}\r\n"
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(nodes.both.is_set)
    wait_for(lambda: nodes.num_left == 2)
    wait_for(gateway.is_idle)
    assert gateway.last_row()["completion_tokens"] == 0


def test_unhedgeable_requests_wait(gateway: Gateway, nodes: Nodes, open_gateway: Any, tmp_path: Path) -> None:
    nodes.will(answers_late)
    assert gateway.ask(batch=True, stream=False) == "".join(WORDS)
    assert len(nodes.asked) == 1
    nodes.will(answers_late)
    headers = {"authorization": f"Bearer {gateway.key}"}
    form = {"data": {"model": "big"}, "files": {"file": ("a.wav", b"RIFF")}}
    assert httpx.post(f"{gateway.url}{SPEECH_TO_TEXT}", headers=headers, timeout=60, **form).status_code == 200
    assert len(nodes.asked) == 1
    with open_gateway("--no-auth", "--exit-with-parent", "--ledger", str(tmp_path / "usage")) as without:
        nodes.will(answers_late)
        Gateway(without.url, tmp_path, "none", "none").ask(stream=False)
        assert len(nodes.asked) == 1


@pytest.mark.parametrize("first", [is_full_when_another_is_asked, dies_when_another_is_asked])
def test_failed_first_attempt_makes_the_hedge_the_next(gateway: Gateway, nodes: Nodes, first: Behaviour) -> None:
    nodes.will(first, streams_when_released)
    with ThreadPoolExecutor() as pool:
        text = pool.submit(gateway.ask)
        wait_for(nodes.both.is_set)
        wait_for(lambda: not gateway.in_flight()[nodes.asked[0][0]])
        assert gateway.in_flight()[nodes.asked[1][0]] == 1
        nodes.released.set()
        assert text.result() == "".join(WORDS)
    row = gateway.last_row()
    assert len(nodes.asked) == 2
    assert (row["node"], row["retries"], row["completion_tokens"]) == (nodes.asked[1][0], 1, len(WORDS))


@pytest.mark.parametrize(("refusing", "status"), [(0, 302), (0, 400), (1, 401), (1, 404), (0, 429), (1, 429)])
def test_a_node_that_refuses_does_not_end_the_other_attempt(
    gateway: Gateway, nodes: Nodes, refusing: int, status: int
) -> None:
    won = gateway.hedges("won")
    script = [refuses(status, when_another_is_asked=True), streams_when_released]
    nodes.will(*(reversed(script) if refusing else script))
    with ThreadPoolExecutor() as pool:
        text = pool.submit(gateway.ask)
        wait_for(nodes.both.is_set)
        wait_for(lambda: not gateway.in_flight()[nodes.asked[refusing][0]])
        nodes.released.set()
        assert text.result() == "".join(WORDS)
    row = gateway.last_row()
    assert (row["node"], row["retries"], row["status"]) == (nodes.asked[1 - refusing][0], 0, 200)
    assert gateway.hedges("won") == won + (refusing == 0)


def test_last_refusal_is_returned(gateway: Gateway, nodes: Nodes) -> None:
    nodes.will(refuses(422, when_another_is_asked=True), refuses(400, when_another_is_asked=True))
    with pytest.raises(AssertionError, match=r'"message":"No\."'):
        gateway.ask()
    assert gateway.last_row()["status"] in (400, 422)
    assert len(nodes.asked) == 2


def test_a_node_that_refused_beside_one_that_died_is_asked_again(gateway: Gateway, nodes: Nodes) -> None:
    nodes.will(dies_when_released, refuses(429, when_another_is_asked=True), answers)
    with ThreadPoolExecutor() as pool:
        text = pool.submit(gateway.ask, stream=False)
        wait_for(nodes.both.is_set)
        wait_for(lambda: not gateway.in_flight()[nodes.asked[1][0]])
        nodes.released.set()
        assert text.result() == "".join(WORDS)
    row = gateway.last_row()
    assert [node for node, _ in nodes.asked][1:] == [row["node"]] * 2
    assert (row["retries"], row["status"]) == (1, 200)


def test_broken_hedge_continues_on_the_first_node(gateway: Gateway, nodes: Nodes) -> None:
    nodes.will(silent, breaks_off, goes_on)
    assert gateway.ask() == "".join(WORDS)
    row, (one, two, three) = gateway.last_row(), nodes.asked
    assert two[0] != one[0] == three[0] == row["node"]
    assert json.loads(three[1])["messages"][-1] == {"role": "assistant", "content": "".join(WORDS[:2])}
    assert (row["retries"], row["prompt_tokens"], row["completion_tokens"]) == (1, 7, len(WORDS))


def test_a_hedge_takes_a_node_with_capacity_and_a_retry_of_the_budget() -> None:
    registry = NodeRegistry([NodeAddress(f"http://node{n}", concurrency=1) for n in range(2)], Upstream(None))
    first, second = registry.nodes
    for node in registry.nodes:
        node.serves([Model("m")])
    placement = Placement("m")
    first.breaker.probed()
    assert registry.take_spare(placement, [first]) is None  # the other is not in yet
    second.breaker.probed()
    assert registry.take_spare(placement, [first]) is second
    assert registry.take_spare(placement, [first]) is None  # it is full
    registry.give_back(second, placement)
    while registry.retries.take():
        pass
    assert registry.take_spare(placement, [first]) is None
    assert second.in_flight == 0
