"""The gateway in front of somebody else's server, which answers in its own way: apps read OpenAI's all the same."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from waiting import wait_for

CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "big"}
COMPLETION = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "big",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
}


@dataclass
class Foreign:
    """Answers with what the test sets."""

    answer: Callable[[], Response] = field(default=lambda: JSONResponse(COMPLETION))

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "big", "object": "model", "owned_by": "somebody"}]})

    async def chat(self, request: Request) -> Response:
        await request.body()
        return self.answer()


@pytest.fixture(scope="module")
def node() -> Foreign:
    return Foreign()


@pytest.fixture(scope="module")
def client(node: Foreign, spawned: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    routes = [Route("/v1/models", node.models), Route("/v1/chat/completions", node.chat, methods=["POST"])]
    with serving(Starlette(routes=routes)) as url:
        command = ["-m", "updraft", "gateway", "--port", "0", "--node", url, "--no-auth", "--exit-with-parent"]
        database = str(tmp_path_factory.mktemp("gateway") / "usage.sqlite")
        with (
            spawned(*command, "--ledger", database) as gateway,
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client,
        ):
            yield client


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="big", messages=[{"role": "user", "content": "hello"}], **options)


def refusal(client: openai.OpenAI) -> tuple[int, str]:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client)
    assert caught.value.body.keys() >= {"message", "type", "param", "code"}
    return caught.value.status_code, caught.value.body["message"]


def test_errors_and_answers_of_any_shape(client: openai.OpenAI, node: Foreign) -> None:
    for status, body, kind, message in (
        (400, b'[{"error": {"message": "API key not valid."}}]', "application/json", "API key not valid."),
        (422, b'{"detail": [{"loc": ["body", "n"], "msg": "too many"}]}', "application/json", "body.n: too many"),
        (500, b"<html><h1>Oops</h1></html>", "text/html", "The node answered 500: Oops"),
        (503, b"", "text/plain", "The node answered 503."),
    ):
        node.answer = lambda status=status, body=body, kind=kind: Response(body, status, media_type=kind)
        assert refusal(client) == (status, message)
    node.answer = lambda: Response(b"", 308, {"location": "http://user:pw@elsewhere/v2?key=1"})
    status, message = refusal(client)
    assert status == 502 and "308: redirects are never" in message and "elsewhere" not in message
    for body in (b"<html>a login page</html>", b"", b'{"error": {"message": "broken"}}'):
        node.answer = lambda body=body: Response(body, media_type="text/html")
        assert refusal(client)[0] == 502
    for body in (json.dumps(COMPLETION).encode("utf-16"), json.dumps(COMPLETION).replace("7", "NaN").encode()):
        node.answer = lambda body=body: Response(body, media_type="application/json")
        assert ask(client).choices[0].message.content == "Hi"


def test_an_adapter_is_asked_for_where_it_is_listed(spawned: Any, tmp_path: Path) -> None:
    """As vLLM lists them: beside the model, as a model."""

    def serve(asked: list[str], *names: str) -> Starlette:
        async def models(_request: Request) -> Response:
            return JSONResponse({"data": [{"id": name, "owned_by": "vllm"} for name in names]})

        async def chat(request: Request) -> Response:
            body = await request.json()
            if body["messages"][0]["content"] == "hello":  # no probe
                asked.append(body["model"])
            return JSONResponse({**COMPLETION, "model": body["model"]})

        return Starlette(routes=[Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])])

    plain, adapted = list[str](), list[str]()
    with serving(serve(plain, "base")) as first, serving(serve(adapted, "base", "base-lora")) as second:
        command = ["-m", "updraft", "gateway", "--port", "0", "--no-auth", "--exit-with-parent"]
        nodes = ["--node", first, "--node", second, "--ledger", str(tmp_path / "usage.sqlite")]
        with (
            spawned(*command, *nodes) as gateway,
            openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client,
        ):
            assert {model.id for model in client.models.list()} == {"base", "base-lora"}
            for model in ["base-lora"] * 6 + ["base"] * 6:
                client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hello"}])
    assert set(plain) == {"base"} and len(plain) >= 2
    assert adapted.count("base-lora") == 6 and adapted.count("base") >= 2


def pieces(client: openai.OpenAI) -> list[tuple[str | None, str | None]]:
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True) if chunk.choices]
    return [(choice.delta.content, choice.finish_reason) for choice in chunks]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("ends", [True, False])
def test_streams_of_any_spelling_end_apart(client: openai.OpenAI, node: Foreign, line_end: str, ends: bool) -> None:
    events = [
        {**CHUNK, "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hel"}, "finish_reason": None}]},
        {**CHUNK, "choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": "stop"}]},
    ]
    lines = [":", *(f"data:{json.dumps(event)}" for event in events), *(["data: [DONE]"] if ends else [])]
    body = ("\ufeff" + "".join(f"{line}{line_end}{line_end}" for line in lines)).encode()

    def answer() -> Response:
        return StreamingResponse(
            iter([body[at : at + 7] for at in range(0, len(body), 7)]), media_type="text/event-stream"
        )

    node.answer = answer
    for _ in range(2):  # nothing of it puts the node out
        assert pieces(client) == [("Hel", None), ("lo", None), (None, "stop")]


CALLED = {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize(("said", "reason"), [({"content": "Hi"}, "stop"), ({"content": "Hi", **CALLED}, "tool_calls")])
def test_an_answer_without_a_finish_reason_has_one(
    client: openai.OpenAI, node: Foreign, said: dict[str, Any], reason: str
) -> None:
    message = {"index": 0, "message": {"role": "assistant", **said}}
    for missing in ({}, {"finish_reason": None}, {"finish_reason": ""}):
        node.answer = lambda missing=missing: JSONResponse({**COMPLETION, "choices": [{**message, **missing}]})
        choice = ask(client).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Hi", reason)
    event = json.dumps({**CHUNK, "choices": [{"index": 0, "delta": {"role": "assistant", **said}}]})
    node.answer = lambda: Response(f"data: {event}\n\ndata: [DONE]\n\n", media_type="text/event-stream")
    assert pieces(client) == [("Hi", None), (None, reason)]


@pytest.mark.parametrize("stream", [True, False])
def test_half_an_emoji_in_an_answer_loses_no_usage(client: openai.OpenAI, node: Foreign, stream: bool) -> None:
    def counted() -> tuple[int, int]:
        (usage,) = httpx.get(f"{str(client.base_url).removesuffix('v1/')}admin/usage", timeout=60).json()["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]

    usage, half = COMPLETION["usage"], "\ud83d"
    whole = {**COMPLETION, "choices": [{"index": 0, "message": {"content": half}, "finish_reason": "stop"}]}
    chunk = {**CHUNK, "choices": [{"index": 0, "delta": {"content": half}, "finish_reason": None}], "usage": usage}
    node.answer = lambda: JSONResponse(COMPLETION)
    ask(client)
    before = counted()
    if stream:
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        node.answer = lambda: Response(body, media_type="text/event-stream")
        assert pieces(client)
    else:
        node.answer = lambda: Response(json.dumps(whole), media_type="application/json")
        ask(client)
    assert counted() == (before[0] + 7, before[1] + 3)


async def words_without_end() -> AsyncGenerator[bytes]:
    delta = {"index": 0, "delta": {"content": "word "}, "finish_reason": None}
    while True:
        yield b"data: %b\n\n" % json.dumps({**CHUNK, "choices": [delta]}).encode()
        await asyncio.sleep(0.01)


async def late(request: Request) -> Response:
    if json.loads(await request.body()).get("stream"):
        return StreamingResponse(words_without_end(), media_type="text/event-stream")
    await asyncio.sleep(60)
    return JSONResponse(COMPLETION)


@pytest.mark.parametrize("card", [{"owned_by": "vllm"}, {"owned_by": "somebody", "max_model_len": 4096}])
def test_a_client_that_leaves_pays_no_more_than_its_node_can_write(
    spawn: Any, tmp_path: Path, card: dict[str, Any]
) -> None:
    """Whatever `max_tokens` says: the time until the client leaves, and the context, are bounds."""

    async def models(_request: Request) -> Response:
        return JSONResponse({"data": [{"id": "big", **card}]})

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", late, methods=["POST"])]
    (tmp_path / "prices.toml").write_text('[prices.models."big"]\ninput = 0\noutput = 10\n')
    (tmp_path / "limits.toml").write_text('[models."big"]\nusd_per_day = 1.0\n')
    options = ("--prices", str(tmp_path / "prices.toml"), "--limits", str(tmp_path / "limits.toml"))
    body = {"model": "big", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2_000_000}

    def tokens() -> list[int]:
        with closing(sqlite3.connect(tmp_path / "usage")) as connection:
            return [count for (count,) in connection.execute("SELECT completion_tokens FROM usage WHERE status = 499")]

    with serving(Starlette(routes=routes)) as url:
        command = ["gateway", "--port", "0", "--node", url, "--no-auth", "--exit-with-parent", *options]
        gateway = spawn("-m", "updraft", *command, "--ledger", str(tmp_path / "usage"))
        for number in (1, 2, 3):
            began = time.monotonic()
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=httpx.Timeout(60, read=0.5))
            wait_for(lambda count=number: len(tokens()) == count)
            most = 4096 if "max_model_len" in card else 5_000 * (time.monotonic() - began)
            assert 0 < tokens()[-1] <= most


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_before_the_usage_pays_the_bound(spawn: Any, tmp_path: Path, stream: bool) -> None:
    routes = [Route("/v1/models", Foreign().models), Route("/v1/chat/completions", late, methods=["POST"])]
    body = {"model": "big", "messages": [{"role": "user", "content": "word " * 1000}], "stream": stream}

    def rows() -> list[tuple[int, int, int]]:
        with closing(sqlite3.connect(tmp_path / "usage")) as connection:
            return connection.execute("SELECT status, prompt_tokens, completion_tokens FROM usage").fetchall()

    with serving(Starlette(routes=routes)) as url:
        command = ["gateway", "--port", "0", "--node", url, "--no-auth", "--exit-with-parent"]
        gateway = spawn("-m", "updraft", *command, "--ledger", str(tmp_path / "usage"))
        with (
            suppress(httpx.ReadTimeout),
            httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=1) as response,
        ):
            next(response.iter_lines())
        wait_for(lambda: len(rows()) == 1)
    ((status, prompt, completion),) = rows()
    assert status == 499
    assert completion > 0 if stream else completion == 1024
    assert 5000 <= prompt <= 5200
