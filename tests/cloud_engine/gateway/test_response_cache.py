"""Kept answers: only those that cannot differ, within a tenant, in bounded memory, marked for what they are."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from gateway_keys import make_key
from hypothesis import given
from hypothesis import strategies as st
from updraft.cloud_engine.gateway.access.principal import Priority
from updraft.cloud_engine.gateway.balancing.registry import NodeRegistry
from updraft.cloud_engine.gateway.balancing.request_queue import QueuePlace
from updraft.cloud_engine.gateway.ledger.metering import UsageRow
from updraft.cloud_engine.gateway.relay.call import Call
from updraft.cloud_engine.gateway.relay.response_cache import ResponseCache
from updraft.cloud_engine.gateway.relay.usage import UsageOptions
from updraft.cloud_engine.gateway.upstream.client import Response

GREEDY: dict[str, Any] = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def counting_node(finish: str | None = "stop") -> Iterator[tuple[str, list[bytes], Event]]:
    """A server that says which of its requests it answers, each as soon as the event allows."""
    bodies: list[bytes] = []
    go = Event()
    go.set()

    class Node(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.append(body)
            number = len(bodies)
            go.wait(60)
            choice = {
                "index": 0,
                "finish_reason": finish,
                "message": {"role": "assistant", "content": f"answer {number}"},
            }
            usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
            if not json.loads(body).get("stream"):
                self.reply(json.dumps({"id": "x", "choices": [choice], "usage": usage}).encode())
                return
            deltas = [{"delta": {"content": f"answer {number}"}}, {"delta": {}, "finish_reason": finish}]
            events = [json.dumps({"id": "x", "choices": [{"index": 0, **delta}]}) for delta in deltas]
            self.reply("".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode(), "text/event-stream")

        def reply(self, body: bytes, kind: str = "application/json") -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Keep the test's output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Node) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies, go
        finally:
            go.set()
            server.shutdown()
            thread.join()


def test_gateway_repeats_cached_answers(spawn: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    one, other = (make_key(keys, name, "inference", "usage") for name in ("one", "other"))
    with counting_node() as (node, bodies, go):
        command = ["gateway", "--port", "0", "--keys", str(keys), "--ledger", str(tmp_path / "db"), "--node", node]
        url = spawn("-m", "updraft", *command, "--response-cache", "1", "--exit-with-parent").url

        def ask(key: str = one, **fields: Any) -> tuple[str, str | None]:
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.post(f"{url}/v1/chat/completions", json={**GREEDY, **fields}, headers=headers, timeout=60)
            assert answer.status_code == 200
            return answer.text, answer.headers.get("x-updraft-cache")

        first, mark = ask()
        assert ("answer 1" in first, mark) == (True, None)
        assert ask() == (first, "hit")
        assert ask(other)[1] is None, "another tenant"
        assert ask(temperature=1)[1] is ask(temperature=1)[1] is None
        assert ask(temperature=1, seed=5)[1] is ask(temperature=1, seed=5)[1] is None, "this node is not ours"
        streamed, mark = ask(stream=True)
        assert mark is None
        assert ask(stream=True) == (streamed, "hit")
        assert streamed.endswith("data: [DONE]\n\n")

        go.clear()
        before = len(bodies)
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, one, max_tokens=7) for _ in range(8)]
            while len(bodies) == before:
                time.sleep(0.01)
            go.set()
            answers = [each.result() for each in asked]
        assert len(bodies) == before + 1, "all share one"
        assert len({text for text, _ in answers}) == 1
        assert sorted(mark or "" for _, mark in answers) == ["", *["hit"] * 7]

        hinted = {"role": "user", "content": [{"type": "text", "text": "long", "cache_control": {"type": "ephemeral"}}]}
        for stream in (False, True):
            ask(messages=[hinted], stream=stream)
            assert json.loads(bodies[-1])["messages"] == [hinted], "hints for the node's own cache go on to it"
        metrics = httpx.get(f"{url}/metrics").text
        spawned_rows = rows(tmp_path / "db", url, one)
    assert "updraft_gateway_cache_hits_total 9.0\n" in metrics
    assert {row[1:] for row in spawned_rows if row[0] == "response-cache"} == {(200, 0, 0)}


def rows(database: Path, url: str, key: str) -> list[tuple[Any, ...]]:
    httpx.get(f"{url}/admin/usage", headers={"authorization": f"Bearer {key}"})  # what is on its way is written first
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute("SELECT node, status, prompt_tokens, completion_tokens FROM usage").fetchall()


def call_of(fields: dict[str, Any], tenant: str) -> tuple[Call, bytearray]:
    received = bytearray()

    async def send(message: Any) -> None:
        received.extend(message.get("body", b""))

    body = json.dumps(fields).encode()
    row = UsageRow(request_id="x", status=200)
    place = QueuePlace(tenant=tenant)
    return Call("x", b"/v1/chat/completions", [], body, "m", False, UsageOptions(), row, 0.0, send, place), received


class UpdraftNodes:
    def runs_updraft(self, model: str) -> bool:
        return True


_REQUESTS = st.tuples(
    st.sampled_from(["a", "b"]), st.integers(0, 12), st.sampled_from([{"temperature": 0}, {"seed": 1}, {}])
)


@given(st.lists(_REQUESTS, max_size=60))
def test_an_answer_is_its_own_and_memory_is_bounded(requests: list[tuple[str, int, dict[str, Any]]]) -> None:
    async def run() -> None:
        cache = ResponseCache(40_000, cast(NodeRegistry, UpdraftNodes()))
        for tenant, number, sampling in requests:
            call, received = call_of({"messages": number, **sampling}, tenant)
            text = f"{tenant} {number} {sampling}" * (300 if number % 3 else 1)
            expected = json.dumps({"choices": [{"finish_reason": "stop", "text": text}]}).encode()

            async def ask(call: Call, expected: bytes = expected) -> None:
                await call.emit(expected, more=False)

            await cache.answer(call, ask)
            assert received == expected
            assert cache._size <= 40_000

    asyncio.run(run())


def test_waiter_of_a_failed_request_sends_its_own() -> None:
    async def run() -> None:
        cache = ResponseCache(2**20, cast(NodeRegistry, UpdraftNodes()))
        failing, _ = call_of(GREEDY, "a")
        waiting, received = call_of(GREEDY, "a")
        started = asyncio.Event()

        async def hang(_call: Call) -> None:
            started.set()
            await asyncio.Event().wait()

        async def ask(call: Call) -> None:
            await call.emit(b"whole", more=False)

        first = asyncio.create_task(cache.answer(failing, hang))
        await started.wait()
        second = asyncio.create_task(cache.answer(waiting, ask))
        await asyncio.sleep(0)
        first.cancel()
        await second
        assert received == b"whole"
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(run())


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        ("batch", "interactive", False),
        ("escalation", "interactive", False),
        ("batch", "escalation", False),
        ("batch", "batch", True),
        ("interactive", "batch", True),
        ("interactive", "interactive", True),
    ],
)
def test_no_request_waits_for_lower_priority(first: Priority, second: Priority, waits: bool) -> None:
    async def run() -> list[str]:
        cache = ResponseCache(2**20, cast(NodeRegistry, UpdraftNodes()))
        asked: list[str] = []
        begun, go = asyncio.Event(), asyncio.Event()

        async def ask(call: Call) -> None:
            asked.append(call.place.priority)
            begun.set()
            await go.wait()
            await call.emit(b"{}", more=False)

        calls = [call_of(GREEDY, "a")[0] for _ in range(2)]
        tasks: list[asyncio.Task[None]] = []
        for call, priority in zip(calls, (first, second), strict=True):
            call.place = QueuePlace(priority, "a")
            tasks.append(asyncio.create_task(cache.answer(call, ask)))
            await begun.wait()
            await asyncio.sleep(0)
        seen = asked.copy()
        go.set()
        await asyncio.gather(*tasks)
        assert not cache._asked
        return seen

    assert asyncio.run(run()) == ([first] if waits else [first, second])


def test_no_request_waits_for_the_client_of_another() -> None:
    """The first client does not read: followers of a whole answer get it, and followers of a stream ask a node."""

    async def run(*, stream: bool) -> bytes:
        cache, asks = ResponseCache(2**20, cast(NodeRegistry, UpdraftNodes())), 0
        stuck, _ = call_of(GREEDY, "a")
        waiting, received = call_of(GREEDY, "a")
        stuck.stream = waiting.stream = stream
        blocked = asyncio.Event()

        async def never(_message: Any) -> None:
            blocked.set()
            await asyncio.Event().wait()

        stuck.send = never

        async def ask(call: Call) -> None:
            nonlocal asks
            asks += 1
            body = b'{"choices": [{"finish_reason": "stop", "text": "%d"}]}' % asks
            body = b"data: %b\n\ndata: [DONE]\n\n" % body if stream else body
            await call.start(cast(Response, SimpleNamespace(headers=[], status=200)), None if stream else body)
            await call.emit(body, more=False)

        first = asyncio.create_task(cache.answer(stuck, ask))
        await blocked.wait()
        async with asyncio.timeout(30):
            await cache.answer(waiting, ask)
            again, repeated = call_of(GREEDY, "a")
            again.stream = stream
            await cache.answer(again, ask)
        assert (received, again.row.node) == (repeated, "response-cache")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return bytes(received)

    assert b'"text": "1"' in asyncio.run(run(stream=False))
    assert b'"text": "2"' in asyncio.run(run(stream=True))


def cached(path: bytes, body: bytes, stream: bool, fields: dict[str, Any] = GREEDY, then: Any = None) -> bool:
    """Return whether an answer of a node is repeated to a second request."""

    async def run() -> bool:
        cache, asks = ResponseCache(2**20, cast(NodeRegistry, UpdraftNodes())), 0

        async def ask(call: Call) -> None:
            nonlocal asks
            asks += 1
            await call.emit(body, more=False)

        for each in (fields, then or fields):
            call, received = call_of(each, "a")
            call.path, call.stream = path, stream
            await cache.answer(call, ask)
            assert received == body
        return asks == 1

    return asyncio.run(run())


def events(*parts: dict[str, Any]) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(part).encode() for part in parts)


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "error", None, 3])
def test_only_finished_answers_are_kept(reason: Any) -> None:
    keeps = reason in ("stop", "length")
    chat = b"/v1/chat/completions?x=1"
    good, last = ({"index": index, "finish_reason": end} for index, end in enumerate(("stop", reason)))
    assert cached(chat, json.dumps({"choices": [good, last]}).encode(), False) is keeps
    begun = {"choices": [{"index": 1, "delta": {"content": "x"}}, {"index": 0, "finish_reason": None}]}
    stream = events(begun, {"choices": [last]}, {"choices": [good]}, {"choices": [], "usage": {}})
    assert cached(chat, stream + b"data: [DONE]\n\n", True) is keeps
    assert not cached(chat, b'{"choices": []}', False)
    assert cached(b"/v1/embeddings", b'{"data": []}', False)


@pytest.mark.parametrize(("status", "stop"), [("completed", "tool_use"), ("failed", "pause_turn")])
def test_only_finished_responses_and_messages_are_kept(status: str, stop: str) -> None:
    keeps, asked = status == "completed", {**GREEDY, "store": False}
    assert cached(b"/v1/responses", json.dumps({"status": status}).encode(), False, asked) is keeps
    begun = {"type": "response.created", "response": {"status": "in_progress"}}
    text = {"type": "response.output_text.delta", "delta": "x"}
    assert cached(b"/v1/responses", events(begun, text, {"response": {"status": status}}), True, asked) is keeps
    assert not cached(b"/v1/responses", events(begun, text), True, asked)
    assert cached(b"/v1/messages", json.dumps({"stop_reason": stop}).encode(), False) is keeps
    ends = {"delta": {"text": "x"}}, {"delta": {"stop_reason": stop}}, {"type": "message_stop"}
    assert cached(b"/v1/messages", events({"message": {"stop_reason": None}}, *ends), True) is keeps


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (b"/v1/responses", {}),  # stored by default
        (b"/v1/responses", {"store": True}),
        (b"/v1/responses", {"store": False, "conversation": "conv_1"}),
        (b"/v1/responses", {"store": False, "previous_response_id": "resp_1"}),
        (b"/v1/responses", {"store": False, "prompt": {"id": "pmpt_1"}}),
        (b"/v1/responses", {"store": False, "tools": [{"type": "web_search"}]}),
        (b"/v1/chat/completions", {"store": True}),
        (b"/v1/chat/completions", {"web_search_options": {}}),
        (b"/v1/chat/completions", {"extra_body": {"conversation": "conv_1"}}),
        (b"/v1/messages", {"container": "container_1"}),
        (b"/v1/messages", {"mcp_servers": [{"type": "url", "url": "https://mcp", "name": "mcp"}]}),
        (b"/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ],
)
def test_answers_from_stored_state_or_the_web_are_not_kept(path: bytes, fields: dict[str, Any]) -> None:
    body = {"status": "completed", "stop_reason": "end_turn", "choices": [{"finish_reason": "stop"}]}
    assert not cached(path, json.dumps(body).encode(), False, {**GREEDY, **fields})


@pytest.mark.parametrize("tool", [{"type": "function", "name": "f"}, {"type": "custom", "name": "f"}, {"name": "f"}])
def test_answers_that_may_call_the_tools_of_a_client_are_kept(tool: dict[str, Any]) -> None:
    fields = {**GREEDY, "store": False, "tools": [tool]}
    assert cached(b"/v1/responses", b'{"status": "completed"}', False, fields)


def test_order_of_fields_is_part_of_the_request() -> None:
    """A schema's properties are answered in their order."""
    one, other = ({**GREEDY, "guided_json": {"properties": {name: {} for name in order}}} for order in ("ab", "ba"))
    body = b'{"choices": [{"finish_reason": "stop"}]}'
    assert cached(b"/v1/completions", body, False, one, one)
    assert not cached(b"/v1/completions", body, False, one, other)


def test_a_finish_that_only_the_gateway_adds_is_not_kept(spawn: Any, tmp_path: Path) -> None:
    """The node's stream ends with [DONE] but without a finish reason."""
    with counting_node(finish=None) as (node, bodies, _):
        headers = {"authorization": f"Bearer {make_key(tmp_path / 'keys', 'one')}"}
        command = ["gateway", "--port", "0", "--keys", str(tmp_path / "keys"), "--ledger", str(tmp_path / "db")]
        url = spawn("-m", "updraft", *command, "--node", node, "--response-cache", "1", "--exit-with-parent").url
        for is_stream in (True, True, False, False):
            stream = {**GREEDY, "stream": is_stream}
            answer = httpx.post(f"{url}/v1/chat/completions", json=stream, headers=headers, timeout=60)
            assert '"finish_reason":"stop"' in answer.text.replace(": ", ":")
    assert len(bodies) == 4
