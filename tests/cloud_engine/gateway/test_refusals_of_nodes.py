"""A node's refusal goes to another node first, and tells the client neither the node's keys nor its addresses."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
COMPLETION = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}]}


@dataclass
class Stub:
    """Refuses with `status`, or streams `begin` and comments; else answers well."""

    status: int = 200
    begin: bytes | None = None
    owner: str = "somebody"
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    # Media types of the bodies.
    kinds: list[str] = field(default_factory=list[str])

    def app(self) -> Starlette:
        return Starlette(
            routes=[Route("/v1/models", self.list), Route("/v1/chat/completions", self.answer, methods=["POST"])]
        )

    async def list(self, _request: Request) -> Response:
        return JSONResponse({"data": [{"id": "big", "owned_by": self.owner}]})

    async def answer(self, request: Request) -> Response:
        self.bodies.append(body := await request.json())
        self.kinds.append(request.headers["content-type"])
        if self.status != 200:
            said = {"error": {"message": "no, says http://10.9.8.7/", "type": "x", "code": "y"}}
            return JSONResponse(said, self.status, {"location": "http://10.9.8.7/"})
        if self.begin is not None:
            return StreamingResponse(self._comments(self.begin), media_type="text/event-stream")
        if body.get("stream"):
            return Response(CHUNK + END, media_type="text/event-stream")
        return JSONResponse(COMPLETION)

    async def _comments(self, begin: bytes) -> AsyncGenerator[bytes]:
        yield begin
        for _ in range(200):
            yield b": ping\n\n"
            await asyncio.sleep(0.1)


@contextmanager
def gateway(spawned: Any, folder: Any, *stubs: Stub, options: tuple[str, ...] = ()) -> Iterator[Any]:
    with ExitStack() as stack:
        nodes = [part for stub in stubs for part in ("--node", stack.enter_context(serving(stub.app())))]
        command = ("-m", "updraft", "gateway", "--port", "0", "--no-auth", "--ledger", str(folder / "db"), *options)
        yield stack.enter_context(spawned(*command, "--exit-with-parent", *nodes))


def ask(url: str, **fields: Any) -> httpx.Response:
    body = {"model": "big", "messages": [{"role": "user", "content": "hi"}], **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [401, 403, 404, 408, 429, 529])
def test_another_node_answers(spawned: Any, tmp_path: Any, status: int, stream: bool) -> None:
    bad, good = Stub(status), Stub()
    with gateway(spawned, tmp_path, bad, good) as running:
        while not bad.bodies:
            answer = ask(running.url, stream=stream)
            assert answer.status_code == 200, answer.text
            assert "Hi" in answer.text


def test_faults_of_providers_are_failures_too(spawned: Any, tmp_path: Any) -> None:
    """Another node answers, and the node goes out of rotation. A missing endpoint (501) is no failure of the node."""
    bad, good = Stub(), Stub()
    with gateway(spawned, tmp_path, bad, good) as running:

        def is_in_rotation(status: int) -> bool:
            bad.status = status
            bad.bodies.clear()
            while not bad.bodies:
                assert ask(running.url).status_code == 200
            return all(node["healthy"] for node in httpx.get(f"{running.url}/admin/nodes", timeout=60).json()["nodes"])

        assert all(map(is_in_rotation, (*[501] * 5, 402, 507, 520, 530)))
        assert not is_in_rotation(524)


def test_the_last_refusal_reaches_the_client_unless_the_operator_is_at_fault(spawned: Any, tmp_path: Any) -> None:
    stub = Stub()
    with gateway(spawned, tmp_path, stub) as running:
        for status, expected in ((404, 404), (408, 408), (429, 429), (401, 502), (403, 502), (307, 502)):
            stub.status = status
            answer = ask(running.url)
            assert answer.status_code == expected
            assert ("10.9.8.7" in answer.text) is (expected == status), answer.text
            assert ("the gateway's key" in answer.text) is (status in (401, 403))


@pytest.mark.parametrize("begin", [b"", CHUNK])
def test_comments_alone_keep_no_stream_alive(spawned: Any, tmp_path: Any, begin: bytes) -> None:
    silent, options = Stub(begin=begin), ("--first-token-timeout-s", "1", "--idle-timeout-s", "1")
    with gateway(spawned, tmp_path, silent, options=options) as running:
        answer = ask(running.url, stream=True)
        assert "the node sent only comments for 4 s" in answer.text


def test_a_node_gets_utf_8_whatever_charset_the_client_names(spawned: Any, tmp_path: Any) -> None:
    stub = Stub()
    body = json.dumps({"model": "big", "messages": [{"role": "user", "content": "\u00e4"}]}, ensure_ascii=False)
    headers = {"content-type": "application/json; charset=utf-16"}
    with gateway(spawned, tmp_path, stub) as running:
        url = f"{running.url}/v1/chat/completions"
        sent = [httpx.post(url, content=body.encode(code), headers=headers, timeout=60) for code in ("utf-8", "utf-16")]
    assert [answer.status_code for answer in sent] == [200, 400]
    assert stub.kinds == ["application/json"]


def test_tenants_of_servers_without_tenants_get_their_own_cache_salt(spawned: Any, tmp_path: Any) -> None:
    stub = Stub(owner="vllm")
    with gateway(spawned, tmp_path, stub) as running:
        for fields in ({}, {}, {"cache_salt": "a"}, {"stream": True, "cache_salt": "a"}):
            assert ask(running.url, **fields).status_code == 200
        first, second, salted, streamed = (body["cache_salt"] for body in stub.bodies)
        assert first == second != salted == streamed != "a"
        assert len(first) > 40
        assert ask(running.url, cache_salt=first).status_code == 200
        assert stub.bodies[-1]["cache_salt"] != first, "no caller names another tenant's salt"


def test_a_caller_raises_no_priority(spawned: Any, tmp_path: Any) -> None:
    stub = Stub()
    with gateway(spawned, tmp_path, stub) as running:
        assert ask(running.url, priority=3).status_code == 200
        for priority in (-1, "-1", -1.5):
            refused = ask(running.url, priority=priority)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")
    assert len(stub.bodies) == 1


def test_a_stream_that_outlasts_the_drain_ends_in_an_error_event(spawned: Any, tmp_path: Any) -> None:
    with gateway(spawned, tmp_path, Stub(begin=CHUNK), options=("--drain-timeout-s", "0.2")) as running:
        body = {"model": "big", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert "Hi" in next(lines)
            running.popen.send_signal(signal.SIGTERM)
            *_, last = [line for line in lines if line.startswith("data: ")]
        assert json.loads(last[6:])["error"]["code"] == "draining"
        assert running.popen.wait(30) == 0
