"""Ollama's API through the real ollama client over the daemon's socket: chats, prompts, tools, pictures, models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from model_hub import Hub, running, tiny_gguf
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, ScriptedGates, ScriptedLocal, tiers
from scripted_cloud import cloud_says, cloud_streams
from serving import serving
from updraft import __version__
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_9", "type": "function", "function": {"name": "weather", "arguments": '{"city": null}'}}
PIXEL = "iVBORw0KGgo="


@pytest.fixture
def local() -> ScriptedLocal:
    return ScriptedLocal()


@pytest.fixture
def client(cloud: FakeCloud, local: ScriptedLocal) -> Iterator[ollama.Client]:
    config = RouterConfig(local="pocket", cloud_url=cloud.url, cloud_model="pocket-large")
    app = daemon_app(Router(config, tiers(local, config, ScriptedGates())), api_key="secret")
    with serving(app, lifespan=True) as url:
        client = ollama.Client(url, headers={"authorization": "Bearer secret"})
        yield client
        client.close()


@pytest.mark.parametrize(("model", "text"), [("local:latest", LOCAL_TEXT), ("cloud", CLOUD_TEXT)])
def test_a_chat_whole_and_streamed(client: ollama.Client, model: str, text: str) -> None:
    whole = client.chat(model, HELLO, keep_alive="5m")
    parts = list(client.chat(model, HELLO, stream=True))
    assert whole.message.content == "".join(part.message.content or "" for part in parts) == text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 3, "a line for each piece"
    for last in (whole, parts[-1]):
        assert (last.model, last.done, last.done_reason) == (model, True, "stop")
        assert last.prompt_eval_count and last.eval_count
        assert last.total_duration is not None and last.eval_duration is not None
        assert last.total_duration == last.eval_duration + (last.prompt_eval_duration or 0) > 0


def test_a_prompt_with_options(client: ollama.Client, local: ScriptedLocal) -> None:
    options = {"num_predict": 2, "temperature": 0.5, "top_k": 3, "seed": 7, "stop": ["x"], "repeat_penalty": 1.1}
    answer = client.generate("local", "hello", system="Be brief.", options=options)
    assert (answer.response, answer.done_reason) == (" ".join(LOCAL_TEXT.split()[:2]), "length")
    messages, params, _ = local.calls[0]
    assert [each.role for each in messages] == ["system", "user"]
    assert (params.temperature, params.top_k, params.seed, params.repetition_penalty) == (0.5, 3, 7, 1.1)
    assert (params.max_tokens, params.stop) == (2, ("x",))
    pieces = list(client.generate("local", "hello", options={"num_predict": -1}, stream=True))
    assert "".join(piece.response or "" for piece in pieces) == LOCAL_TEXT
    assert client.generate("local").done_reason == "load"


def test_tools_thinking_and_pictures(client: ollama.Client, cloud: FakeCloud) -> None:
    cloud_says(cloud, {"content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]}, "tool_calls")
    asked: Any = [{"role": "user", "content": "weather?", "images": [PIXEL]}]
    first = client.chat("cloud", asked, tools=[TOOL], think="low", format={"type": "object"})
    assert first.message.thinking == "Hm." and first.message.tool_calls is not None
    assert first.message.tool_calls[0].function.arguments == {"city": None}
    sent = cloud.requests[-1]
    assert (sent["reasoning_effort"], sent["tools"][0]["function"]["name"]) == ("low", "weather")
    assert sent["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert sent["messages"][0]["content"][1]["image_url"]["url"] == f"data:image/png;base64,{PIXEL}"

    cloud_streams(cloud, {"content": "I look."}, {"tool_calls": [{**CALL, "index": 0}]}, finish_reason="tool_calls")
    again: Any = [*asked, first.message, {"role": "tool", "tool_name": "weather", "content": "rain"}]
    parts = list(client.chat("cloud", again, stream=True, think=False, format="json"))
    calls = [call.function.name for part in parts for call in part.message.tool_calls or ()]
    assert (calls, parts[-1].done_reason) == (["weather"], "stop")
    sent = cloud.requests[-1]
    _, called, told = sent["messages"]
    assert called["tool_calls"][0]["function"]["arguments"] == '{"city":null}'
    assert told == {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "rain"}
    assert (sent["reasoning_effort"], sent["response_format"]) == ("none", {"type": "json_object"})
    cloud.says = None
    for think, effort in (("false", "none"), ("true", None), (None, None)):
        client.chat("cloud", [{"role": "user", "content": "hi"}], think=think)  # pyright: ignore[reportArgumentType]
        assert cloud.requests[-1].get("reasoning_effort") == effort


def test_results_that_name_no_call_belong_to_the_calls_in_order(client: ollama.Client, cloud: FakeCloud) -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "c")]
    results = [
        {"role": "tool", "content": "of b", "tool_name": "b"},
        *({"role": "tool", "content": f"of {name}"} for name in "ac"),
    ]
    client.chat("cloud", [{"role": "user", "content": "all"}, {"role": "assistant", "tool_calls": calls}, *results])
    _, called, *told = cloud.requests[-1]["messages"]
    names = {call["id"]: call["function"]["name"] for call in called["tool_calls"]}
    assert [(names[each["tool_call_id"]], each["content"]) for each in told] == [
        ("b", "of b"),
        ("a", "of a"),
        ("c", "of c"),
    ]


def test_models_embeddings_and_version(client: ollama.Client) -> None:
    assert {model.model for model in client.list().models} == {"auto", "local", "cloud", "pocket-large", "fake-small"}
    shown = client.show("local:latest")
    assert shown.capabilities and "tools" in shown.capabilities
    assert shown.modelinfo and shown.modelinfo["updraft.context_length"] == 512
    assert [model.model for model in client.ps().models] == ["fake-small"]
    assert len(client.embed("cloud", ["a", "b"]).embeddings) == 2
    assert len(client.embeddings("cloud", "a").embedding) == 1
    assert client._client.get("/api/version").json() == {"version": __version__}  # pyright: ignore[reportPrivateUsage]


def test_a_pull_tells_how_far_it_is(client: ollama.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UPDRAFT_HOME", str(tmp_path))
    with running(Hub({"owner/repo": {"tiny-Q8_0.gguf": tiny_gguf()}})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        *told, last = client.pull("hf.co/owner/repo", stream=True)
        assert last.status == "success" and all(isinstance(each.completed, int) for each in told)
        assert client.pull("hf.co/owner/repo").status == "success"
        for stream in (False, True):
            with pytest.raises(ollama.ResponseError, match="nothing"):
                list(client.pull("hf.co/owner/nothing", stream=stream))
    with pytest.raises(ollama.ResponseError, match="smollm2"):
        client.pull("llama3")


def test_errors_are_ollamas(client: ollama.Client, cloud: FakeCloud) -> None:
    for options, words in (({"num_ctx": 8192}, "options.num_ctx"), ({"mirostat": 1}, "options.mirostat")):
        with pytest.raises(ollama.ResponseError, match=words) as caught:
            client.chat("local", HELLO, options=options)
        assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="gpt-9"):
        client.chat("gpt-9", HELLO)
    with pytest.raises(ollama.ResponseError, match="answers no call"):
        client.chat("local", [*HELLO, {"role": "tool", "content": "rain"}])
    cloud.mode = "cut"
    with pytest.raises(ollama.ResponseError):
        list(client.chat("cloud", HELLO, stream=True))
