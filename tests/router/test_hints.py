"""Hints, vendors' tools, incomplete histories and texts for booleans on every endpoint of a daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, ScriptedLocal, tiers
from serving import serving
from updraft.router.accounting.budget import BudgetLimits
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from updraft.text.tool_calls import ToolSyntax
from updraft.text.tool_formats import ToolFormat

USER = {"role": "user", "content": "hello"}
#: Every hint, for any endpoint.
HINTS: dict[str, Any] = {
    "client_metadata": {"session": 1},
    "context_management": [{"type": "clear"}],
    "defer_loading": True,
    "diagnostics": {"previous_message_id": None},
    "inference_geo": "us",
    "background_options": {},
    "max_tool_calls": 3,
    "cache_control": {"type": "ephemeral"},
    "output_config": {"effort": "low"},
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "think": True,
    "user": "ann",
    "safety_identifier": "ann",
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"ttl": "30m"},
}
METADATA = {"metadata": {"a": "b"}}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/embeddings": {"input": "hello"},
    "/v1/messages": {"messages": [USER], "max_tokens": 50},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/responses": {"input": "hello"},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/chat/completions/input_tokens": {"messages": [USER]},
    "/api/chat": {"messages": [USER], "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
    "/api/embed": {"input": "hello"},
    "/api/embeddings": {"prompt": "hello"},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [65]},
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
VENDORS: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "custom", "custom": {"name": "patch"}},
    {"type": "namespace", "name": "n", "tools": []},
    {"type": "computer_use_preview", "display_width": 1},
]


@pytest.fixture
def local() -> ScriptedLocal:
    local = ScriptedLocal()
    local.tool_format = ToolFormat("hermes", ToolSyntax("<tool_call>", "</tool_call>"), {})
    return local


@pytest.fixture
def config(cloud: FakeCloud) -> RouterConfig:
    return RouterConfig(local="pocket", cloud_url=cloud.url, cloud_model="pocket-large")


@pytest.fixture
def client(config: RouterConfig, local: ScriptedLocal) -> Iterator[httpx.Client]:
    with (
        serving(daemon_app(Router(config, tiers(local, config))), lifespan=True) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def ask(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    sent = client.post(path, json=body)
    assert sent.status_code == status, sent.text
    return sent.json()


def notes_of(answer: Any) -> list[str]:
    return answer.get("updraft", {}).get("notes") or []


@pytest.mark.parametrize("path", ENDPOINTS)
def test_hints_are_accepted(client: httpx.Client, path: str) -> None:
    for name, value in {**HINTS, **METADATA}.items():
        for other in (value, 7, {"a": {"b": [1]}}):
            ask(client, path, **ENDPOINTS[path], model="local", **{name: other})


def test_ignored_hints_share_one_note(client: httpx.Client) -> None:
    hints = {name: HINTS[name] for name in ("service_tier", "prompt_cache_key", "user")} | METADATA
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
        given = ask(client, path, **ENDPOINTS[path], model="local", **hints)
        assert notes_of(given) == ["metadata, user, service_tier, prompt_cache_key: no effect"]
        assert notes_of(ask(client, path, **ENDPOINTS[path], model="local")) == []
    message = ask(client, "/v1/messages", **ENDPOINTS["/v1/messages"], model="local", metadata={"user_id": "ann"})
    assert notes_of(message) == ["metadata: no effect"]
    response = ask(client, "/v1/responses", input="hello", model="local", prompt_cache_key="k", **METADATA)
    assert notes_of(response) == ["prompt_cache_key: no effect"] and response["metadata"] == METADATA["metadata"]
    chat = ask(client, "/api/chat", **ENDPOINTS["/api/chat"], model="local", client_metadata={}, user="ann")
    assert notes_of(chat) == ["client_metadata: no effect", "user: no effect"]
    bare = ask(client, "/v1/completions", prompt="hello", model="local", reasoning_effort="low", think=True)
    assert notes_of(bare) == ["reasoning_effort, think: no effect"]


def test_a_user_with_a_budget_has_an_effect(local: ScriptedLocal, tmp_path: Path) -> None:
    budget = BudgetLimits(cloud_tokens=5)
    config = RouterConfig(local="pocket", budget_per_user=budget, ledger=tmp_path / "ledger.sqlite3")
    with serving(daemon_app(Router(config, tiers(local, config))), lifespan=True) as url, httpx.Client() as client:
        assert notes_of(ask(client, f"{url}/v1/chat/completions", messages=[USER], model="local", user="ann")) == []


def test_clouds_get_the_hints_that_they_know(client: httpx.Client, cloud: FakeCloud) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"):
        answer = ask(client, path, **ENDPOINTS[path], model="cloud", **HINTS)
        sent = cloud.requests[-1]
        assert not {"client_metadata", "context_management", "defer_loading"} & set(sent)
        assert (sent["user"], sent["prompt_cache_key"], sent["prompt_cache_options"]) == ("ann", "k", {"ttl": "30m"})
        noted = ", ".join(notes_of(answer))
        assert all(name in noted for name in ("client_metadata", "context_management", "defer_loading"))
        assert "user" not in noted


def test_a_hint_is_no_reason_to_ask_the_cloud(client: httpx.Client, cloud: FakeCloud) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"):
        for hint in (HINTS, {**METADATA, "tools": []} if "/api" in path else METADATA):
            answer = ask(client, path, **ENDPOINTS[path], model="auto", **hint)
            assert answer["updraft"]["tier"] == "local"
    assert cloud.requests == []


def test_efforts_of_other_apis_set_the_effort(client: httpx.Client, local: ScriptedLocal) -> None:
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"):
        for hint, effort in (
            ({"reasoning_effort": "low"}, "low"),
            ({"output_config": {"effort": "high"}}, "high"),
            ({"reasoning": {"effort": "high"}}, "high"),
            ({"thinking": {"type": "enabled", "budget_tokens": 20_000}}, "high"),
            ({"think": "high"}, "high"),
        ):
            ask(client, path, **ENDPOINTS[path], model="local", **hint)
            assert local.options[-1]["effort"] == effort, (path, hint)
    refused = ask(client, "/v1/chat/completions", 400, messages=[USER], model="local", output_config={"format": {}})
    assert refused["error"]["param"] == "output_config.format"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_vendors_tools_are_left_out(client: httpx.Client, local: ScriptedLocal, path: str) -> None:
    asked = {**ENDPOINTS[path], "model": "auto"}
    for vendor in VENDORS:
        assert notes_of(ask(client, path, **asked, tools=[vendor, TOOL])) == [
            f"tools[0]: left out, {vendor['type']!r} is a tool of a vendor's servers"
        ]
        assert [tool.function.name for tool in local.options[-1]["tools"].tools] == ["weather"]
        ask(client, path, **asked, tools=[vendor])
        assert local.options[-1]["tools"] is None
    hinted = {**TOOL, "cache_control": {"type": "ephemeral"}, "defer_loading": True}
    assert notes_of(ask(client, path, **asked, tools=[hinted])) == ["tools[0].defer_loading: no effect"]
    counted = {"model": "local", "messages": [USER], "tools": [VENDORS[0], hinted]}
    assert ask(client, "/tokenize", **counted)["count"]


@pytest.mark.parametrize("model", ["local", "cloud", "auto"])
def test_a_function_without_its_object_is_named(client: httpx.Client, model: str) -> None:
    for wrong in ({"type": "function", "name": "flat"}, {"name": "flat"}, {"type": "function", "function": {}}):
        asked = {"messages": [USER], "model": model, "tools": [TOOL, wrong]}
        assert ask(client, "/v1/chat/completions", 400, **asked)["error"]["param"] == "tools[1]"


def test_forced_vendors_tools_are_refused(client: httpx.Client, local: ScriptedLocal) -> None:
    asked: dict[str, Any] = {"messages": [USER], "model": "local"}
    for tools, choice in (
        (VENDORS[:1], "required"),
        ([*VENDORS, TOOL], {"type": "custom", "custom": {"name": "patch"}}),
        (VENDORS, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": VENDORS[:1]}}),
    ):
        refused = ask(client, "/v1/chat/completions", 400, **asked, tools=tools, tool_choice=choice)
        assert refused["error"]["param"] == "tool_choice"
    allowed = {"mode": "auto", "tools": [VENDORS[0], {"type": "function", "function": {"name": "weather"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    ask(client, "/v1/chat/completions", **asked, tools=[*VENDORS, TOOL], tool_choice=choice)
    assert [tool.function.name for tool in local.options[-1]["tools"].tools] == ["weather"]


@pytest.mark.parametrize("model", ["local", "cloud"])
def test_incomplete_histories_are_completed(
    client: httpx.Client, cloud: FakeCloud, local: ScriptedLocal, model: str
) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo", "at": None}}}
    chat: list[Any] = [
        USER,
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "tool_calls": [call, {"id": "b", "function": {"name": "now"}}]},
        {"role": "tool", "name": "now", "content": None},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "again"},
        USER,
    ]
    ask(client, "/v1/chat/completions", messages=chat, model=model)
    blocks = [{"type": "tool_use", "name": "weather", "input": {"city": "Oslo", "at": None}}]
    ask(
        client,
        "/v1/messages",
        max_tokens=9,
        model=model,
        messages=[
            USER,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [{"type": "tool_result", "content": "rain"}]},
        ],
    )
    items: list[Any] = [
        {"type": "function_call", "id": "fc_1", "name": "weather", "arguments": {"city": "Oslo", "at": None}},
        {"type": "function_call_output", "call_id": "fc_1", "output": "rain"},
    ]
    ask(client, "/v1/responses", input=items, model=model)
    ask(client, "/v1/responses", input="", model=model)
    if model == "cloud":
        first, second, third, _ = [request["messages"] for request in cloud.requests]
        assert first[1]["content"] == "" and first[3]["content"] == ""
        calls = first[2]["tool_calls"]
        assert [each["id"] for each in calls] == ["call_2_0", "b"]
        assert [each["function"]["arguments"] for each in calls] == ['{"city":"Oslo","at":null}', "{}"]
        assert [each.get("tool_call_id") for each in first[3:6]] == ["b", "call_2_0", "b"]
        for messages in (second, third):
            [called] = [message["tool_calls"][0] for message in messages if message.get("tool_calls")]
            assert called["function"]["arguments"] == '{"city":"Oslo","at":null}'
            assert messages[-1]["tool_call_id"] == called["id"]
    else:
        assert [each[0][-1].text for each in local.calls] == ["hello", "rain", "rain", ""]


def test_numbers_beyond_64_bits_do_not_fail_here(client: httpx.Client, cloud: FakeCloud) -> None:
    ask(client, "/v1/chat/completions", messages=[USER], model="cloud", seed=1e30, max_tokens=8.0)
    assert (cloud.requests[-1]["seed"], cloud.requests[-1]["max_tokens"]) == (1e30, 8.0)
    ask(client, "/v1/chat/completions", 400, messages=[USER], model="local", seed=1e30)


def test_texts_for_booleans(client: httpx.Client, cloud: FakeCloud, local: ScriptedLocal) -> None:
    for model, text in (("local", LOCAL_TEXT), ("cloud", CLOUD_TEXT)):
        chat = ask(
            client,
            "/v1/chat/completions",
            messages=[USER],
            model=model,
            stream="false",
            logprobs="False",
            store="false",
            parallel_tool_calls="true",
            tools=[TOOL],
        )
        assert chat["choices"][0]["message"]["content"] == text
        assert ask(client, "/v1/completions", prompt="a", model=model, stream="false", echo="false")["choices"]
        assert ask(client, "/v1/messages", **ENDPOINTS["/v1/messages"], model=model, stream="false")["content"]
        assert ask(client, "/v1/responses", input="a", model=model, stream="false", store="false")["output"]
    assert [request.get("stream") for request in cloud.requests] == [False, False, None, None]
    asked = {"messages": [USER], "model": "auto", "updraft": {"private": "true"}}
    options = {"stream": "true", "stream_options": {"include_usage": "false"}}
    streamed = client.post("/v1/chat/completions", json={**asked, **options})
    assert streamed.headers["content-type"].startswith("text/event-stream") and '"usage":{' not in streamed.text
    assert streamed.headers["x-updraft-tier"] == "local" and local.calls


def test_tokens_are_counted_for_every_model(client: httpx.Client, config: RouterConfig) -> None:
    picture = [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}, {"type": "text", "text": "hello hello"}]
    for path in ("/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/chat/completions/input_tokens"):
        here = ask(client, path, **ENDPOINTS[path], model="local")
        there = ask(client, path, **ENDPOINTS[path], model="cloud")
        assert there["input_tokens"] == here["input_tokens"] == len("hello") + 1
        assert "updraft" not in here and "device's tokenizer" in notes_of(there)[0]
        assert ask(client, path, 404, **ENDPOINTS[path], model="other")["error"]
    seen = ask(
        client, "/v1/chat/completions/input_tokens", messages=[{"role": "user", "content": picture}], model="cloud"
    )
    assert seen["input_tokens"] == 3 and "estimate" in notes_of(seen)[0]
    assert ask(client, "/v1/messages/count_tokens", 400, messages=[{"role": "robot"}], model="cloud")["error"]
    only_cloud = RouterConfig(local=None, cloud_url=config.cloud_url, cloud_model="pocket-large")
    with serving(daemon_app(Router(only_cloud, tiers(None, only_cloud))), lifespan=True) as url:
        for model in ("cloud", "auto"):
            counted = ask(client, f"{url}/v1/messages/count_tokens", messages=[USER], model=model)
            assert counted["input_tokens"] == 2 and "estimate" in notes_of(counted)[0]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/api/chat", {"options": {"num_predict": "x"}}, "options.num_predict"),
        ("/api/chat", {"options": {"repeat_penalty": 9}}, "options.repeat_penalty"),
        ("/api/generate", {"raw": True, "options": {"num_predict": "x"}}, "options.num_predict"),
        ("/v1/responses", {"temperature": 9, "max_output_tokens": 5}, "temperature"),
        ("/v1/responses", {"text": {"format": {"type": "xml"}}}, "text.format"),
        ("/v1/messages", {"stop_sequences": ["a", "b", "c", "d", "e"]}, "stop_sequences"),
    ],
)
def test_errors_name_the_callers_field(client: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    error = ask(client, path, 400, **{**ENDPOINTS[path], **fields, "model": "local"})["error"]
    assert param in (error if isinstance(error, str) else error["message"])
    if not isinstance(error, str):
        assert error["param"].startswith(param)


def test_long_inputs_of_embeddings_are_cut_on_request(client: httpx.Client, local: ScriptedLocal) -> None:
    """Ollama cuts by default, with a note here."""
    inputs = ["x" * 2 * local.context_length, "short"]
    for truncate in ({}, {"truncate": True}, {"truncate": "true"}):
        answer = ask(client, "/api/embed", model="local", input=inputs, **truncate)
        assert notes_of(answer) == [f"input[0]: cut to {local.context_length - 1} tokens"]
        assert [len(each[0][0]) for each in local.calls[-2:]] == [local.context_length - 1, len("short") + 1]
    ask(client, "/api/embed", model="local", input=inputs, truncate=False)
    assert local.calls[-2][0][0] == inputs[0], "the engine refuses what is too long"
    assert notes_of(ask(client, "/api/embed", model="cloud", input=inputs)) == []


def test_a_raw_prompt_ignores_system_and_template(client: httpx.Client, local: ScriptedLocal) -> None:
    asked: dict[str, Any] = {"model": "local", "prompt": "Once", "stream": False, "system": "Be brief."}
    raw = ask(client, "/api/generate", **asked, raw=True, template="<{{ .Prompt }}>")
    assert notes_of(raw) == ["system: no effect", "template: no effect"] and local.calls[-1][0] == ["Once"]
    filled = ask(client, "/api/generate", **asked, template="{{ .System }} {{ .Prompt }}")
    assert notes_of(filled) == [] and local.calls[-1][0] == ["Be brief. Once"]
