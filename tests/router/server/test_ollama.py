"""Ollama's API through the real ollama client over the daemon's socket: chats, prompts, tools, pictures, models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from model_hub import Hub, running, tiny_gguf
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, ScriptedGates, ScriptedLocal, tiers
from scripted_cloud import cloud_says, cloud_streams
from serving import serving
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


def ask(client: ollama.Client, method: str, path: str, **body: Any) -> Any:
    sent = client._client.request(method, path, json=body or None)  # pyright: ignore[reportPrivateUsage]
    assert sent.status_code == 200, sent.text
    return sent.json()


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


def test_options_without_an_equivalent_are_hints(client: ollama.Client) -> None:
    """Frameworks send `num_ctx` with every request; Ollama itself ignores unknown options."""
    options = {"num_ctx": 8192, "num_keep": 4, "mirostat": 1, "numa": "false", "seed": None, "num_predict": 0}
    notes = [f"options.{name}: no effect" for name in ("num_ctx", "num_keep", "mirostat", "numa")]
    told: dict[str, Any] = {"model": "local", "options": options, "truncate": True, "stream": False}
    for path, body, text in (
        ("/api/chat", {"messages": HELLO, "shift": True}, "message"),
        ("/api/generate", {"prompt": "hello"}, "response"),
    ):
        answer = ask(client, "POST", path, **told, **body)
        assert LOCAL_TEXT in str(answer[text])
        assert answer["updraft"]["notes"][:5] == [*notes, "truncate: no effect"]
    del told["stream"]
    embedded = ask(client, "POST", "/api/embed", **{**told, "model": "cloud"}, input="a")
    assert embedded["updraft"]["notes"] == [*notes, "options.num_predict: no effect", "truncate: no effect"]
    old = ask(client, "POST", "/api/embeddings", model="cloud", prompt="a", options={"num_ctx": 1}, keep_alive="5m")
    assert old["embedding"] and old["updraft"]["notes"] == ["options.num_ctx: no effect"]
    assert client.embed("cloud", "a", truncate=True, options={"num_thread": 2}).embeddings


def test_no_texts_have_no_embeddings(client: ollama.Client, cloud: FakeCloud) -> None:
    for texts in ([], ""):
        assert client.embed("cloud", texts).embeddings == []
    assert not cloud.requests


def test_switches_as_texts(client: ollama.Client) -> None:
    whole = ask(client, "POST", "/api/chat", model="local", messages=HELLO, stream="false", logprobs="False")
    assert whole["message"]["content"] == LOCAL_TEXT and "logprobs" not in whole
    assert ask(client, "POST", "/api/generate", model="local", prompt="hi", stream="false", raw="false")["response"]


def test_logprobs(client: ollama.Client) -> None:
    whole = client.chat("local", HELLO, logprobs=True, top_logprobs=1)
    parts = list(client.chat("local", HELLO, logprobs=True, stream=True))
    streamed = [each for part in parts for each in part.logprobs or ()]
    assert whole.logprobs and len(whole.logprobs) == len(LOCAL_TEXT.split())
    assert [each.token for each in streamed] == [each.token for each in whole.logprobs]


def test_a_prompt_without_chat_template(client: ollama.Client, cloud: FakeCloud, local: ScriptedLocal) -> None:
    """`raw`, `template` and `suffix` are prompts to complete, whole and streamed."""
    assert client.generate("local", "Once", raw=True, options={"num_predict": 2}).response == "one two"
    assert "".join(part.response for part in client.generate("local", "Once", raw=True, stream=True)) == LOCAL_TEXT
    template = (
        "{{- if .System }}<s>{{ .System }}</s>{{ else }}<none>{{ end }}\n<u>{{ .Prompt }}</u>{{ .Response }}<end>"
    )
    for system, prompt in (("Be brief.", "<s>Be brief.</s>\n<u>Once</u>"), ("", "<none>\n<u>Once</u>")):
        client.generate("local", "Once", template=template, system=system)
        assert local.calls[-1][0] == [prompt]
        client.generate("cloud", "Once", template=template, system=system, think=True)
        assert cloud.requests[-1]["prompt"] == prompt and "messages" not in cloud.requests[-1]
    filled = client.generate("cloud", "def f(", suffix="return 1", options={"num_predict": 9, "num_ctx": 2})
    assert filled.response == CLOUD_TEXT and filled.done_reason == "stop" and filled.eval_count
    sent = cloud.requests[-1]
    assert (sent["prompt"], sent["suffix"], sent["max_tokens"]) == ("def f(", "return 1", 9)
    form = client.generate("local", "Once", raw=True, format="json")
    assert form.done
    for fields, words in (
        ({"suffix": "x"}, "suffix"),
        ({"suffix": "x", "prompt": ""}, "suffix"),
        ({"suffix": "x", "template": "{{ .Prompt }}"}, "suffix needs a template with .Suffix"),
        ({"template": "{{ range .Messages }}{{ end }}"}, "raw: true"),
        ({"template": "{{ .Prompt }}" + "x" * 20_000}, "template"),
        ({"raw": True, "images": [PIXEL]}, "images"),
        ({"raw": True, "context": [1]}, "context"),
    ):
        with pytest.raises(ollama.ResponseError, match=words) as caught:
            client.generate("local", **{"prompt": "Once", **fields})
        assert caught.value.status_code == 400


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
    for think, effort in (("false", "none"), ("true", "medium"), (True, "medium"), (None, None)):
        client.chat("cloud", [{"role": "user", "content": "hi"}], think=think)  # pyright: ignore[reportArgumentType]
        assert cloud.requests[-1].get("reasoning_effort") == effort


@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029", "\x0b", "\x1e"])
def test_unicode_line_ends_do_not_split_a_line(client: ollama.Client, cloud: FakeCloud, end: str) -> None:
    """The client splits the stream with `str.splitlines`."""
    text = f"a{end}b"
    cloud_streams(cloud, {"content": text})
    assert "".join(part.message.content or "" for part in client.chat("cloud", HELLO, stream=True)) == text
    arguments = json.dumps({"city": text}, ensure_ascii=False)
    call = {**CALL, "index": 0, "function": {"name": "weather", "arguments": arguments}}
    cloud_streams(cloud, {"tool_calls": [call]}, finish_reason="tool_calls")
    parts = client.chat("cloud", HELLO, stream=True, tools=[TOOL])
    assert [made.function.arguments for part in parts for made in part.message.tool_calls or ()] == [{"city": text}]


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
    assert shown.modelinfo and shown.modelinfo["updraft.context_length"] == 512
    assert [model.model for model in client.ps().models] == ["fake-small"]
    assert len(client.embed("cloud", ["a", "b"]).embeddings) == 2
    assert len(client.embeddings("cloud", "a").embedding) == 1
    version = ask(client, "GET", "/api/version")["version"]
    assert tuple(map(int, version.split("."))) >= (0, 12, 0), "clients require a minimum version"


def test_one_digest_for_each_model(client: ollama.Client) -> None:
    """llm-ollama takes names with one digest for one model, and keeps capabilities by digest."""
    listed = {model.model: model.digest for model in client.list().models}
    assert listed["local"] == listed["fake-small"] and listed["cloud"] == listed["pocket-large"]
    assert len({listed[name] for name in ("auto", "local", "cloud")}) == 3
    for name, digest in listed.items():
        assert name and digest and len(digest) == 64
        assert ask(client, "POST", "/api/show", name=name)["digest"] == digest
    assert [model.digest for model in client.ps().models] == [listed["local"]]


@pytest.mark.parametrize(("has_tools", "thinks"), [(False, False), (True, True)])
def test_capabilities_are_the_models_own(
    client: ollama.Client, local: ScriptedLocal, has_tools: bool, thinks: bool
) -> None:
    local.tool_format, local.reasoning = has_tools, thinks
    shown = client.show("local")
    assert shown.capabilities == ["completion", *["tools"] * has_tools, *["thinking"] * thinks, "embedding"]
    assert (".Tools" in (shown.template or "")) == has_tools
    assert client.show("cloud").capabilities == ["completion", "tools", "vision"]


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
    for name in ("hf.co/../etc", "hf:owner/repo/../x y", "pypi:../m.whl", "pypi:m-1.tar.gz", "pypi:a b"):
        for stream in (False, True):
            with pytest.raises(ollama.ResponseError, match="is not of the form") as caught:
                list(client.pull(name, stream=stream))
            assert caught.value.status_code == 400, "the caller's mistake"
    with pytest.raises(ollama.ResponseError, match="smollm2"):
        client.pull("llama3")
    for fields in ({"name": "llama3"}, {"model": "llama3", "stream": "false"}):  # `name` is an older name of the field
        with pytest.raises(AssertionError, match="smollm2"):
            ask(client, "POST", "/api/pull", **fields)


def test_errors_are_ollamas(client: ollama.Client, cloud: FakeCloud) -> None:
    with pytest.raises(ollama.ResponseError, match="temperature") as caught:
        client.chat("local", HELLO, options={"temperature": -1})
    assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="gpt-9"):
        client.chat("gpt-9", HELLO)
    with pytest.raises(ollama.ResponseError, match="answers no call"):
        client.chat("local", [*HELLO, {"role": "tool", "content": "rain"}])
    cloud.mode = "cut"
    with pytest.raises(ollama.ResponseError):
        list(client.chat("cloud", HELLO, stream=True))
