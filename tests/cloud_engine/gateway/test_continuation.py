"""A node dies during a stream, and another node continues the same text: real nodes, and servers like vLLM."""

from __future__ import annotations

import json
import sqlite3
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from dying_node import dying
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tiny_model import write_model

TOKENS = 100


def start_gateway(spawn: Any, tmp_path: Path, *urls: str) -> Any:
    nodes = [word for url in urls for word in ("--node", url)]
    db = ("--ledger", str(tmp_path / "usage.sqlite"))
    return spawn("-m", "updraft", "gateway", "--port", "0", *nodes, "--no-auth", *db, "--exit-with-parent")


def rows(tmp_path: Path, gateway: Any) -> list[dict[str, Any]]:
    httpx.get(f"{gateway.url}/admin/usage", timeout=60).raise_for_status()
    with closing(sqlite3.connect(tmp_path / "usage.sqlite")) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute("SELECT * FROM usage ORDER BY id")]


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


MESSAGES = [{"role": "user", "content": "Tell me something"}]


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_the_text_equals_that_of_an_unbroken_run(spawn: Any, tmp_path: Path) -> None:
    """Greedy and by a seed, twice in one answer: the random model writes broken characters, so tokens must do."""
    folder = write_model(tmp_path / "tiny", 0, context=2048)
    command = ("-m", "updraft", "node", "--port", "0", "--threads", "1", "--model", str(folder), "--exit-with-parent")
    nodes, deaths = [spawn(*command) for _ in range(4)], deque[int]()
    cases: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
        (CHAT, {"messages": MESSAGES, "temperature": 1.3, "seed": 11, "ignore_eos": True}, (20, 40)),
        (COMPLETIONS, {"prompt": "Tell me something", "temperature": 0}, (20,)),
    ]
    with ExitStack() as stack:
        gateway = start_gateway(spawn, tmp_path, *(stack.enter_context(dying(node, deaths)) for node in nodes))
        for path, asked, kills in cases:
            body = {"model": "tiny", "max_tokens": TOKENS, "stream_options": {"include_usage": True}, **asked}
            alive = next(node for node in nodes if node.popen.poll() is None)
            expected = streamed(alive.url, path, body)
            deaths.extend(kills)
            got = streamed(gateway.url, path, body)
            assert not deaths
            check_equal(got, expected, path)
            row = rows(tmp_path, gateway)[-1]
            assert (row["status"], row["retries"]) == (200, len(kills))
            usage = got[-1]["usage"]
            assert (row["prompt_tokens"], row["completion_tokens"]) == (usage["prompt_tokens"], TOKENS)


def streamed(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = httpx.post(f"{url}{path}", json={**body, "stream": True}, timeout=120)
    assert answer.status_code == 200, answer.text
    return list(events(iter(answer.text.splitlines())))


def check_equal(got: list[dict[str, Any]], expected: list[dict[str, Any]], path: str) -> None:
    assert text_of(got) == text_of(expected)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in got}) == 1
    choices = [choice for chunk in got for choice in chunk["choices"]]
    assert sum("role" in choice.get("delta", {}) for choice in choices) == (path == CHAT)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert not any("token_ids" in choice for choice in choices)
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [got[-1]["usage"][name] for name in names] == [expected[-1]["usage"][name] for name in names]


@dataclass
class Stub:
    """A server like vLLM: it knows `continue_final_message`, and breaks off after some words where it is to."""

    owner: str = "vllm"
    # Of words; -1: before the first event.
    breaks_after: int | None = None
    chunk: dict[str, Any] = field(default_factory=dict[str, Any])  # added to each choice
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    # As `breaks_after`, for one request after the other, whichever of several servers has it.
    script: deque[int | None] = field(default_factory=deque[int | None])

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/models", self.models), Route(CHAT, self.chat, methods=["POST"])])

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "big", "object": "model", "owned_by": self.owner}]})

    async def chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[str]:
        breaks_after = self.script.popleft() if self.script else self.breaks_after
        if breaks_after == -1:
            raise RuntimeError("as if it were killed")
        said = body["messages"][-1]["content"] if body.get("continue_final_message") else ""
        words = ANSWER.removeprefix(said).split("|")[: body["max_tokens"]]
        words = [word + "|" for word in words[:-1]] + words[-1:]

        def event(choices: list[dict[str, Any]], count: int) -> str:
            usage = {"prompt_tokens": 7 + said.count("|"), "completion_tokens": count, "total_tokens": 0}
            head = {"id": f"cmpl-{id(self)}", "object": "chat.completion.chunk", "created": id(self), "model": "big"}
            return f"data: {json.dumps({**head, 'choices': choices, 'usage': usage})}\n\n"

        yield event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], 0)
        for number, word in enumerate(words):
            if number == breaks_after:
                raise RuntimeError("as if it were killed")
            delta = {"index": 0, "delta": {"content": word}, "finish_reason": None, **self.chunk}
            yield event([delta], number + 1)
        yield event([{"index": 0, "delta": {}, "finish_reason": "stop"}], len(words))
        yield event([], len(words))
        yield "data: [DONE]\n\n"


ANSWER = 'one|\u00e4 "two"|\n|four|five|six|seven'


def ask_stubs(spawn: Any, tmp_path: Path, stubs: list[Stub], **asked: Any) -> list[dict[str, Any]]:
    """The client's stream where the first stub is asked first."""
    body = {"model": "big", "messages": MESSAGES, "max_tokens": 100, "stream": True, **asked}
    with serving(stubs[0].app()) as first, serving(stubs[1].app()) as second:
        gateway = start_gateway(spawn, tmp_path, first, second)
        for _ in stubs:  # idle nodes take turns
            answer = httpx.post(f"{gateway.url}{CHAT}", json=body, timeout=60)
            assert answer.status_code == 200
            if len(stubs[0].bodies) == 1:
                return [*events(iter(answer.text.splitlines())), *rows(tmp_path, gateway)[-1:]]
    raise AssertionError("the first stub was never asked")


def test_vllm_servers_continue_from_the_text(spawn: Any, tmp_path: Path) -> None:
    stubs = [Stub(breaks_after=3), Stub()]
    *got, row = ask_stubs(spawn, tmp_path, stubs, stream_options={"include_usage": True})
    assert text_of(got) == ANSWER
    assert {chunk["id"] for chunk in got} == {f"cmpl-{id(stubs[0])}"}
    assert sum("role" in choice["delta"] for chunk in got for choice in chunk["choices"]) == 1
    body = stubs[1].bodies[-1]
    assert body["messages"] == [*MESSAGES, {"role": "assistant", "content": 'one|\u00e4 "two"|\n|'}]
    assert (body["continue_final_message"], body["add_generation_prompt"], body["max_tokens"]) == (True, False, 97)
    assert "answer_token_ids" not in body
    assert got[-1]["usage"] == {"prompt_tokens": 7, "completion_tokens": 7, "total_tokens": 14}
    assert (row["status"], row["retries"], row["prompt_tokens"], row["completion_tokens"]) == (200, 1, 7, 7)


@pytest.mark.parametrize(
    ("script", "is_whole"),
    [([-1, 3, None], True), ([1, 1, 1, None], True), ([1, 1, 1, 1, None], False)],
    ids=["before its first word", "three", "four"],
)
def test_a_request_that_gets_further_each_time_may_lose_three_nodes(
    spawn: Any, tmp_path: Path, script: list[int | None], is_whole: bool
) -> None:
    asked = deque(script)
    body = {"model": "big", "messages": MESSAGES, "max_tokens": 100, "stream": True}
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(Stub(script=asked).app())) for _ in range(5)]
        gateway = start_gateway(spawn, tmp_path, *urls)
        answer = httpx.post(f"{gateway.url}{CHAT}", json=body, timeout=60)
        again = httpx.post(f"{gateway.url}{CHAT}", json=body, timeout=60)
    got = [*events(iter(answer.text.splitlines()))]
    assert "error" in got[-1] or text_of(got) == ANSWER
    assert ("error" not in got[-1]) == is_whole
    assert again.status_code == (200 if is_whole else 502), "what killed four nodes is asked of no fifth"


def test_requests_that_break_every_node_leave_the_nodes_to_others(spawn: Any, tmp_path: Path) -> None:
    """The nodes are up: other requests are answered, however many nodes have broken off such a stream."""

    class Fragile(Stub):
        async def stream(self, body: dict[str, Any]) -> AsyncGenerator[str]:
            self.breaks_after = 1 if "poison" in body["messages"][0]["content"] else None
            async for event in super().stream(body):
                yield event

    with ExitStack() as stack:
        urls = [stack.enter_context(serving(Fragile().app())) for _ in range(3)]
        gateway = start_gateway(spawn, tmp_path, *urls)

        def ask(text: str) -> httpx.Response:
            body = {"model": "big", "messages": [{"role": "user", "content": text}], "max_tokens": 9, "stream": True}
            return httpx.post(f"{gateway.url}{CHAT}", json=body, timeout=60)

        for number in range(6):
            broken = [ask(f"poison {number}.{part}") for part in range(2)]
            assert all("error" in each.text for each in broken)
            answers = [ask(f"hello {number}.{part}") for part in range(4)]
            assert [each.status_code for each in answers] == [200] * 4
            assert all(text_of([*events(iter(each.text.splitlines()))]) == ANSWER for each in answers)


@pytest.mark.parametrize(
    ("second", "asked", "chunk"),
    [
        (Stub(owner="somebody"), {}, {}),
        (Stub(), {"n": 2}, {}),
        (Stub(), {"logprobs": True}, {}),
        (Stub(), {"response_format": {"type": "json_object"}}, {}),
        (Stub(), {"frequency_penalty": 0.5}, {}),
        (Stub(), {"truncate_prompt_tokens": 50}, {}),
        (Stub(), {"truncation": "auto"}, {}),
        (Stub(), {}, {"delta": {"content": "", "tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}),
        (Stub(), {}, {"delta": {"reasoning_content": "hm"}}),
    ],
)
def test_client_gets_an_error_if_no_node_can_continue_exactly(
    spawn: Any, tmp_path: Path, second: Stub, asked: dict[str, Any], chunk: dict[str, Any]
) -> None:
    *got, row = ask_stubs(spawn, tmp_path, [Stub(second.owner, 3, chunk), second], **asked)
    assert got[-1]["error"]["type"] == "upstream_error"
    assert "send the request again" in got[-1]["error"]["message"]
    assert (row["status"], row["retries"], row["completion_tokens"]) == (502, 0, 3)
    assert all(body["messages"] == MESSAGES for body in second.bodies)
