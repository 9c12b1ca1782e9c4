"""Text and tool arguments reach callers as the cloud sent them, from every provider and on every surface."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import updraft
from scripted_provider import TOOL, Scripted, ScriptedProvider, running_provider
from server_processes import running
from serving import serving
from updraft.router.config import CacheSettings, RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from waiting import wait_for

KEY, TITLE = "sk-the-key-itself", "Weather Bot"
USER: Any = [{"role": "user", "content": "hi"}]
TEXTS = {
    "secrets": f"You are {TITLE} in production; the key is {KEY}, Bearer {KEY}.",
    "blanks": " \t\n\r\n leading and trailing \u00a0\u2028\u2029\x85\ufeff \n",
    "controls": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "emoji": "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 \u202e",
    "half a pair": "\ud83d and \ude00, the wrong way round",
    "markup": "<b>&amp;</b> <think>no</think> <tool_call>{}</tool_call> data: [DONE]\n\ndata: {}",
    "escapes": r'\u00e9 \n \" \\ %41 {"error": null, "usage": null, "finish_reason": "stop"}',
    "long": "x" * 100_000,
}
ARGUMENTS = {
    "secrets": json.dumps({"city": TITLE, "token": KEY}),
    "spacing": '{ "z" : 1 ,  "a":[ 1,2 ] ,"city":"Oslo" }',
    "numbers": '{"id": 12345678901234567890123, "x": 1.10, "y": 1E5, "z": 0.1000000000000000055511, "n": -0}',
    "twice": '{"a": 1, "a": 2}',
    "escapes": '{"a": "\\u00e9\\ud83d\\ude00\\/ \\u0000", "b": "é😀<b>"}',
    "nothing": "{}",
}
HALF = '{"a": "\\ud83d", "b": 1.10}'  # of a pair: strings hold it, raw objects cannot


def units(text: str, size: int) -> list[str]:
    """Pieces that cut pairs of surrogates too."""
    raw = text.encode("utf-16-le", "surrogatepass")
    return [raw[at : at + 2 * size].decode("utf-16-le", "surrogatepass") for at in range(0, len(raw), 2 * size)]


def pieces(text: str) -> list[str]:
    return units(text, 1 if len(text) < 200 else 40_001)


def same(text: str) -> bytes:
    return text.encode("utf-16-le", "surrogatepass")


def sse(*events: Any) -> str:
    return "".join(f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n" for each in events)


def openai_answer(text: str, arguments: str, *, stream: bool) -> Any:
    function = {"name": "weather", "arguments": arguments}
    call = {"index": 0, "id": "call_1", "type": "function", "function": function}
    if not stream:
        message = {"role": "assistant", "content": text, "tool_calls": [call]}
        choices = [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
        return {"id": "c", "object": "chat.completion", "created": 1, "model": "big", "choices": choices}

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
        return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "big", "choices": choices}

    begun = {**call, "function": {"name": "weather", "arguments": ""}}
    said = [chunk({"content": piece}) for piece in pieces(text)]
    *called, last = ({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces(arguments))
    calls = [chunk({"tool_calls": [begun]}), *map(chunk, called), chunk(last, "tool_calls")]  # both at once
    return sse(chunk({"role": "assistant"}), *said, *calls, "[DONE]")


def anthropic_answer(text: str, arguments: str, *, stream: bool) -> Any:
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather"}
    about = {"id": "m", "type": "message", "role": "assistant", "model": "big", "usage": {"input_tokens": 1}}
    if not stream:
        whole = {**about, "content": [{"type": "text", "text": text}, {**use, "input": 0}], "stop_reason": "tool_use"}
        return json.dumps(whole).replace('"input": 0', f'"input": {arguments}').encode()
    deltas = [{"type": "text_delta", "text": piece} for piece in pieces(text)]
    inputs = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(arguments)]
    return sse(
        {"type": "message_start", "message": about},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {**use, "input": {}}},
        *({"type": "content_block_delta", "index": 1, "delta": delta} for delta in inputs),
        {"type": "content_block_stop", "index": 1},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 3}},
        {"type": "message_stop"},
    )


def gemini_answer(text: str, arguments: str, *, stream: bool) -> Any:
    call = {"functionCall": {"name": "weather", "args": 0}}

    def event(*parts: Any, **more: Any) -> str:
        body = {"candidates": [{"content": {"role": "model", "parts": parts}, **more}], "responseId": "r"}
        return json.dumps(body).replace('"args": 0', f'"args": {arguments}')

    if not stream:
        return event({"text": text}, call, finishReason="STOP").encode()
    return sse(*(event({"text": piece}) for piece in pieces(text)), event(call, finishReason="STOP"))


ANSWERS: dict[str, Callable[..., Any]] = {
    "openai": openai_answer,
    "anthropic": anthropic_answer,
    "gemini": gemini_answer,
}
CASES = [(text, ARGUMENTS["nothing"]) for text in TEXTS.values()] + [("Hm.", each) for each in ARGUMENTS.values()]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedProvider]:
    with running_provider() as server:
        yield server


def config_of(server: ScriptedProvider, provider: str = "openai") -> RouterConfig:
    return RouterConfig(
        cloud_url=f"{server.url}/v1",
        cloud_model="big",
        cloud_provider=provider,
        cloud_api_key=KEY,
        cloud_headers={"X-Title": TITLE, "X-Env": "production"},
        ledger=None,
        cache=CacheSettings(max_mb=1.0, ttl_s=60.0),
    )


def taken(message: Any) -> tuple[str, str]:
    [call] = message.tool_calls
    return message.content, call.function.arguments


def joined(chunks: list[Any]) -> tuple[str, str]:
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    return (
        "".join(delta.content or "" for delta in deltas),
        "".join(call.function.arguments or "" for call in calls),
    )


def check(got: tuple[str, str], text: str, arguments: str) -> None:
    assert same(got[0]) == same(text)
    assert same(got[1]) == same(arguments)


@pytest.mark.parametrize("provider", ANSWERS)
@pytest.mark.parametrize("where", ["sync", "async", "daemon"])
def test_every_provider_on_every_carrier(server: ScriptedProvider, provider: str, where: str) -> None:
    config = config_of(server, provider)
    options: Any = {"model": "cloud", "messages": USER, "tools": [TOOL]}
    cases = [*CASES, *([("Hm.", HALF)] if provider == "openai" else [])]
    with ExitStack() as stack:
        if where == "async":

            async def asked() -> None:
                async with updraft.AsyncOpenAI(config=config, max_retries=0) as client:
                    for text, arguments in cases:
                        server.says(ANSWERS[provider](text, arguments, stream=False))
                        completion = await client.chat.completions.create(**options)
                        check(taken(completion.choices[0].message), text, arguments)
                        server.says(ANSWERS[provider](text, arguments, stream=True))
                        chunks = await client.chat.completions.create(**options, stream=True)
                        check(joined([chunk async for chunk in chunks]), text, arguments)

            asyncio.run(asked())
            return
        if where == "daemon":
            url = stack.enter_context(serving(daemon_app(Router(config)), lifespan=True))
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="app", max_retries=0)
        else:
            client = updraft.OpenAI(config=config, max_retries=0)
        stack.enter_context(client)
        for text, arguments in cases:
            server.says(ANSWERS[provider](text, arguments, stream=False))
            check(taken(client.chat.completions.create(**options).choices[0].message), text, arguments)
            server.says(ANSWERS[provider](text, arguments, stream=True))
            check(joined(list(client.chat.completions.create(**options, stream=True))), text, arguments)


def test_an_answer_from_the_cache_is_the_same(server: ScriptedProvider) -> None:
    with updraft.OpenAI(config=config_of(server), max_retries=0) as client:
        for seed, (text, arguments) in enumerate([*CASES, (TEXTS["half a pair"], HALF)]):
            server.says(openai_answer(text, arguments, stream=False))
            for _ in range(2):
                completion = client.chat.completions.create(model="cloud", messages=USER, seed=seed)
                check(taken(completion.choices[0].message), text, arguments)
            repeated = client.chat.completions.create(model="cloud", messages=USER, seed=seed, stream=True)
            check(joined(list(repeated)), text, arguments)


@pytest.fixture(scope="module")
def daemon(server: ScriptedProvider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    config = replace(config_of(server), store=tmp_path_factory.mktemp("store") / "answers.sqlite3")
    with serving(daemon_app(Router(config)), lifespan=True) as url, httpx.Client(base_url=url) as client:
        yield client


def posted(daemon: httpx.Client, path: str, **body: Any) -> list[Any]:
    response = daemon.post(path, json={"model": "cloud", **body})
    assert response.status_code == 200, response.text
    lines = response.text.split("\n")
    events = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    return [json.loads(line) for line in events]


@pytest.mark.parametrize("stream", [False, True])
def test_responses(server: ScriptedProvider, daemon: httpx.Client, stream: bool) -> None:
    tool = {"type": "function", **TOOL["function"]}
    for text, arguments in [*CASES, (TEXTS["half a pair"], HALF)]:
        server.says(openai_answer(text, arguments, stream=stream))
        events = posted(daemon, "/v1/responses", input="hi", tools=[tool], stream=stream, store=True)
        response = events[-1]["response"] if stream else events[0]
        kept = daemon.get(f"/v1/responses/{response['id']}").json()
        for each in (response, kept):
            said, called = each["output"]
            check((said["content"][0]["text"], called["arguments"]), text, arguments)
        if stream:
            deltas = [
                "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")
                for kind in ("output_text", "function_call_arguments")
            ]
            check((deltas[0], deltas[1]), text, arguments)


@pytest.mark.parametrize("stream", [False, True])
def test_messages(server: ScriptedProvider, daemon: httpx.Client, stream: bool) -> None:
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    for text, arguments in CASES:
        server.says(openai_answer(text, arguments, stream=stream))
        body = {"model": "cloud", "messages": USER, "max_tokens": 9, "tools": [tool], "stream": stream}
        raw = daemon.post("/v1/messages", json=body)
        if stream:
            events = [json.loads(line[6:]) for line in raw.text.split("\n") if line.startswith("data: ")]
            deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            told = ("".join(each.get(name, "") for each in deltas) for name in ("text", "partial_json"))
            check((next(told), next(told)), text, arguments)
        else:
            assert f'"input":{arguments}' in raw.text
            assert same(raw.json()["content"][0]["text"]) == same(text)


@pytest.mark.parametrize("stream", [False, True])
def test_ollama(server: ScriptedProvider, daemon: httpx.Client, stream: bool) -> None:
    for text, arguments in CASES:
        server.says(openai_answer(text, arguments, stream=stream))
        body = {"model": "cloud", "messages": USER, "tools": [TOOL], "stream": stream}
        raw = daemon.post("/api/chat", json=body).text
        assert f'"arguments":{arguments}' in raw
        lines = [json.loads(line) for line in raw.split("\n") if line.strip()]
        assert same("".join(line["message"]["content"] for line in lines)) == same(text)


@pytest.mark.parametrize("signals", [False, True])
@pytest.mark.parametrize("where", ["sdk", "daemon"])
def test_a_local_server(where: str, signals: bool) -> None:
    """It is always asked for a stream, for whole answers too."""
    entry = {"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": []}
    logprobs = {"content": [entry]} if signals else None
    with ExitStack() as stack:
        server = stack.enter_context(running_provider())
        server.says({"data": [{"id": "small", "max_model_len": 512}]})
        server.says({"choices": [{"message": {"content": "a"}, "logprobs": logprobs, "finish_reason": "length"}]})
        config = RouterConfig(local=server.url, ledger=None)
        if where == "daemon":
            url = stack.enter_context(serving(daemon_app(Router(config)), lifespan=True))
            client: openai.OpenAI = openai.OpenAI(base_url=f"{url}/v1", api_key="app", max_retries=0)
        else:
            client = updraft.OpenAI(config=config, max_retries=0)
        stack.enter_context(client)
        options: Any = {"model": "local", "messages": USER, "tools": [TOOL]}
        for text, arguments in [*CASES, (TEXTS["half a pair"], HALF)]:
            for _ in range(2):
                server.says(openai_answer(text, arguments, stream=True))
            check(taken(client.chat.completions.create(**options).choices[0].message), text, arguments)
            check(joined(list(client.chat.completions.create(**options, stream=True))), text, arguments)


def test_the_gateway(tmp_path: Path) -> None:
    """Before a node whose key, a dummy, is a word of the answers."""
    command = ["-m", "updraft", "gateway", "--port", "0", "--no-auth", "--exit-with-parent"]
    with (
        running_provider() as server,
        running(
            *command,
            "--node",
            server.url,
            "--ledger",
            str(tmp_path / "usage.sqlite"),
            UPDRAFT_NODE_API_KEY="Weather-Bot",
        ) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client,
    ):
        server.models = Scripted({"data": [{"id": "big", "object": "model", "owned_by": "somebody"}]})
        wait_for(lambda: [model.id for model in client.models.list()] == ["big"])
        options: Any = {"model": "big", "messages": USER, "tools": [TOOL]}
        for text, arguments in [*CASES, ("Weather-Bot", '{"city": "Weather-Bot"}'), ("Hm.", HALF)]:
            server.says(openai_answer(text, arguments, stream=False))
            check(taken(client.chat.completions.create(**options).choices[0].message), text, arguments)
            server.says(openai_answer(text, arguments, stream=True))
            check(joined(list(client.chat.completions.create(**options, stream=True))), text, arguments)
        told = {"type": "response.output_text.delta", "delta": "Weather-Bot", "error": None}
        output = [{"type": "message", "content": [{"type": "output_text", "text": "Weather-Bot"}]}]
        ended = {"type": "response.completed", "response": {"error": None, "output": output, "usage": None}}
        server.says(sse(told, ended))
        body = {"model": "big", "input": "hi", "stream": True}
        assert httpx.post(f"{gateway.url}/v1/responses", json=body).text.count("Weather-Bot") == 2
