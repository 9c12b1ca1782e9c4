"""Anthropic's Messages API, as it is documented: requests, answers, streams and errors, over sockets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
import updraft
from router_fakes import tiers
from scripted_provider import CALL, IMAGE, TALK, TOOL, Ask, ScriptedProvider, anthropic_says, deltas, events
from serving import serving
from updraft.accounting.reported_usage import ReportedUsage
from updraft.protocol.errors import ConfigurationError
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app
from updraft.router.tiers.failures import CloudFailure
from updraft.router.tiers.providers.anthropic import AnthropicProvider

NATIVE = {"cloud_provider": "anthropic"}
MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-x",
    "content": [
        {"type": "thinking", "thinking": "It rains.", "signature": "abc"},
        {"type": "text", "text": "Take "},
        {"type": "text", "text": "a coat."},
    ],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {
        "input_tokens": 10,
        "cache_creation_input_tokens": 2,
        "cache_read_input_tokens": 5,
        "output_tokens": 7,
    },
}
STREAM = (
    {
        "type": "message_start",
        "message": {**MESSAGE, "content": [], "stop_reason": None, "usage": {"input_tokens": 25, "output_tokens": 1}},
    },
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "xyz"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hel"}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "lo"}},
    {"type": "content_block_stop", "index": 1},
    {
        "type": "content_block_start",
        "index": 2,
        "content_block": {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}},
    },
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": ""}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"city": '}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '"Oslo"}'}},
    {"type": "content_block_stop", "index": 2},
    {
        "type": "content_block_start",
        "index": 3,
        "content_block": {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
    },
    {"type": "content_block_stop", "index": 3},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": {"output_tokens": 9},
    },
    {"type": "message_stop"},
)


def test_a_request_with_everything(provider: ScriptedProvider, ask: Ask) -> None:
    provider.says(MESSAGE)
    ask(
        NATIVE,
        messages=TALK,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        stop="END",
        temperature=0.5,
        max_completion_tokens=100,
        user="u1",
        reasoning_effort="high",
        n=1,
        service_tier="flex",
        verbosity="medium",
        metadata={"app": "mine"},
        prompt_cache_retention="24h",
        prediction={"type": "content", "content": "x"},
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    )
    (asked,) = provider.asked
    assert asked.path == "/v1/messages"
    assert asked.headers["x-api-key"] == "sk-secret-1"
    assert asked.headers["anthropic-version"] == "2023-06-01"
    assert "authorization" not in asked.headers
    call = {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}
    image = {"type": "base64", "media_type": "image/png", "data": IMAGE.partition(",")[2]}
    assert asked.body == {
        "model": "m",
        "max_tokens": 100,
        "system": "Be brief.",
        "temperature": 0.5,
        "stop_sequences": ["END"],
        "metadata": {"user_id": "u1"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "tools": [
            {
                "name": "weather",
                "description": "Of a city.",
                "input_schema": {"type": "object", "properties": {}},
            }
        ],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "And here?"}, {"type": "image", "source": image}]},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "I look."}, {**call, "id": "call_1"}, {**call, "id": "call_2"}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_2",
                        "content": [{"type": "text", "text": '{"sky": "blue"}'}],
                    },
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
    }


def test_an_answer_becomes_a_completion(provider: ScriptedProvider, ask: Ask) -> None:
    provider.says(MESSAGE)
    done = ask(NATIVE)
    assert provider.asked[0].body["max_tokens"] > 0, "the API wants a limit"
    choice = done["choices"][0]
    deltas = choice["message"].pop("deltas")
    assert [delta["content"] for delta in deltas if delta.get("content")] == ["Take ", "a coat."]
    expected = {"role": "assistant", "content": "Take a coat.", "refusal": None, "reasoning_content": "It rains."}
    assert choice["message"] == {**expected, "thinking_blocks": [MESSAGE["content"][0]]}
    assert (done["id"], done["model"], choice["finish_reason"]) == ("msg_1", "claude-x", "stop")
    assert (done["usage"]["prompt_tokens"], done["usage"]["completion_tokens"]) == (17, 7)
    assert done["usage"]["prompt_tokens_details"]["cached_tokens"] == 5


@pytest.mark.parametrize(
    ("reason", "finish"), [("max_tokens", "length"), ("stop_sequence", "stop"), ("refusal", "content_filter")]
)
def test_why_it_ended(provider: ScriptedProvider, ask: Ask, reason: str, finish: str) -> None:
    provider.says({**MESSAGE, "stop_reason": reason})
    assert ask(NATIVE)["choices"][0]["finish_reason"] == finish


def test_a_tool_call_comes_back_in_chat_form(provider: ScriptedProvider, ask: Ask) -> None:
    use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo"}}
    provider.says({**MESSAGE, "content": [use], "stop_reason": "tool_use"})
    choice = ask(NATIVE, tools=[TOOL])["choices"][0]
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"].pop("arguments")) == json.loads(CALL["function"]["arguments"])
    assert call == {"id": "call_1", "type": "function", "function": {"name": "weather"}}
    assert choice["finish_reason"] == "tool_calls"


def test_a_stream(provider: ScriptedProvider, ask: Ask) -> None:
    provider.says(events(*STREAM))
    chunks = ask(NATIVE, stream=True, stream_options={"include_usage": True})
    assert provider.asked[0].body["stream"] is True
    assert deltas(chunks, "content") == ["Hel", "lo"]
    assert deltas(chunks, "reasoning_content") == ["Hm."]
    signed = {"index": 0, "type": "thinking", "thinking": "Hm.", "signature": "xyz"}
    assert deltas(chunks, "thinking_blocks") == [[signed]]
    calls: dict[int, str] = {}
    for part in (part for parts in deltas(chunks, "tool_calls") for part in parts):
        calls[part["index"]] = calls.get(part["index"], "") + part["function"]["arguments"]
    assert {index: json.loads(text) for index, text in calls.items()} == {0: {"city": "Oslo"}, 1: {}}
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["prompt_tokens"] == 25
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    assert {chunk["id"] for chunk in chunks} == {"msg_1"}


@pytest.fixture(scope="module")
def daemon(server: ScriptedProvider) -> Iterator[str]:
    """URL of a daemon without a device, whose cloud is the scripted provider."""
    key: dict[str, Any] = {"cloud_url": server.url, "cloud_model": "m", "cloud_api_key": "sk-secret-1", **NATIVE}
    config = RouterConfig(local=None, ledger=None, **key)
    with serving(daemon_app(Router(config, tiers(None, config))), lifespan=True) as url:
        yield url


def blocks_of(provider: ScriptedProvider) -> list[dict[str, Any]]:
    return [block for message in provider.asked[-1].body["messages"] for block in message["content"]]


def test_ids_of_other_models_become_ids_of_the_api(provider: ScriptedProvider, ask: Ask) -> None:
    long = "x" * 80
    given = [
        "functions.read:0",
        "functions_read_0",
        "",
        "call|1",
        "call|1",
        f"{long}1",
        f"{long}2",
        "toolu_1",
        "\u00e9",
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Read."}]
    for identifier in given:
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": identifier}]},
            {"role": "tool", "tool_call_id": identifier, "content": identifier},
        ]
    both = [{**CALL, "id": "same"}, {**CALL, "id": "same"}]
    results = [{"role": "tool", "tool_call_id": "same", "content": text} for text in "12"]
    messages += [{"role": "assistant", "content": "", "tool_calls": both}, *results]
    for _ in range(2):
        provider.says(MESSAGE)
        ask(NATIVE, messages=messages)
    assert provider.asked[0].body == provider.asked[1].body, "a conversation keeps its IDs, which caches rely on"
    calls = [block["id"] for block in blocks_of(provider) if block["type"] == "tool_use"]
    assert [block["tool_use_id"] for block in blocks_of(provider) if block["type"] == "tool_result"] == calls
    assert len(set(calls)) == len(calls) == len(given) + 2
    assert all(re.fullmatch("[A-Za-z0-9_-]{1,64}", each) for each in calls)
    assert calls[7] == "toolu_1", "an ID that the API takes stays as it is"


def test_blank_texts_are_left_out(provider: ScriptedProvider, ask: Ask) -> None:
    provider.says(MESSAGE)
    parts = [{"type": "text", "text": text} for text in ("one", " \n", "two")]
    messages = [
        {"role": "system", "content": " \n"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "\n\n"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "\t"},
        {"role": "assistant", "content": "So far:  "},
    ]
    ask(NATIVE, messages=messages)
    body = provider.asked[-1].body
    assert "system" not in body
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user", "assistant"]
    assert [block["text"] for block in blocks_of(provider) if "text" in block] == ["one", "two", "three", "So far:"]
    assert [block["content"] for block in blocks_of(provider) if block["type"] == "tool_result"] == [[]]


@pytest.mark.parametrize("stream", [False, True])
def test_signed_thoughts_come_back_to_the_cloud(provider: ScriptedProvider, stream: bool) -> None:
    signed = [
        {"type": "thinking", "thinking": "I look.", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "c2VjcmV0"},
        {"type": "thinking", "thinking": "", "signature": "bW9yZQ=="},
    ]
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    asked: dict[str, Any] = {"model": "cloud", "messages": [{"role": "user", "content": "Hi"}]}
    with updraft.OpenAI(
        local=None, cloud_url=provider.url, cloud_provider="anthropic", cloud_model="m", cloud_api_key="sk-secret-1"
    ) as client:
        if stream:
            begin, *_, end, stop = STREAM
            provider.says(events(begin, *block_events(*signed, use), end, stop))
            with client.chat.completions.stream(**asked) as chunks:
                message = chunks.get_final_completion().choices[0].message
        else:
            provider.says({**MESSAGE, "content": [*signed, use], "stop_reason": "tool_use"})
            message = client.chat.completions.create(**asked).choices[0].message
        result = {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"}
        provider.says(MESSAGE)
        client.chat.completions.create(**{**asked, "messages": [*asked["messages"], message, result]})
    assert provider.asked[-1].body["messages"][1]["content"] == [*signed, use]


def block_events(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of whole blocks; thoughts come in pieces."""
    made: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        begun = {**block, "thinking": "", "signature": ""} if block["type"] == "thinking" else block
        made.append({"type": "content_block_start", "index": index, "content_block": begun})
        for name in ("thinking", "signature") if block["type"] == "thinking" else ():
            for piece in (block[name][:2], block[name][2:]):
                delta = {"type": f"{name}_delta", name: piece}
                made.append({"type": "content_block_delta", "index": index, "delta": delta})
        made.append({"type": "content_block_stop", "index": index})
    return made


def test_thoughts_of_other_models_stay_here(provider: ScriptedProvider, ask: Ask) -> None:
    provider.says(MESSAGE)
    unsigned = [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": [], "signature": "x"}, {}]
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "thinking_blocks": unsigned}
    ask(NATIVE, messages=[{"role": "user", "content": "Hi"}, said, {"role": "user", "content": "So?"}])
    assert [block["type"] for block in blocks_of(provider)] == ["text"] * 3


@pytest.mark.parametrize(("ended", "finish"), [(STREAM[:8], "stop"), (STREAM[:-2], "tool_calls")])
def test_a_stream_without_a_stop_reason(
    provider: ScriptedProvider, ask: Ask, ended: list[dict[str, Any]], finish: str
) -> None:
    provider.says(events(*ended, STREAM[-1]))
    assert ask(NATIVE, stream=True)[-1]["choices"][0]["finish_reason"] == finish
    provider.says(events(STREAM[0], STREAM[-1]))
    with pytest.raises(CloudFailure, match="ended before any content"):
        ask(NATIVE, stream=True)


def test_a_cut_stream_and_an_error_in_one(provider: ScriptedProvider, ask: Ask) -> None:
    provider.says(events(*STREAM[:8]))
    with pytest.raises(CloudFailure, match="cut"):
        ask(NATIVE, stream=True)
    failure = AnthropicProvider().reported("http://h", {"type": "overloaded_error", "message": "Overloaded"})
    assert (failure.kind, failure.error.status, failure.transient) == ("unreachable", 529, True)
    refused = {"type": "error", "error": {"type": "authentication_error", "message": "No."}}
    provider.says(events(STREAM[0], refused))
    with pytest.raises(CloudFailure) as raised:
        ask(NATIVE, stream=True)
    assert (raised.value.kind, raised.value.error.status) == ("refused", 401)


def test_an_overloaded_server_is_asked_again(provider: ScriptedProvider, ask: Ask) -> None:
    busy = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}, "request_id": "req_1"}
    provider.says(busy, 529, retry_after="0.01")
    provider.says({"type": "error", "error": {"type": "rate_limit_error", "message": "Slow"}}, 429, retry_after="0.01")
    provider.says(MESSAGE)
    assert ask(NATIVE)["choices"][0]["message"]["content"] == "Take a coat."
    assert len(provider.asked) == 3


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (401, "authentication_error", "invalid_api_key"),
        (404, "not_found_error", "model_not_found"),
        (402, "billing_error", "insufficient_quota"),
        (400, "invalid_request_error", None),
    ],
)
def test_a_refusal(provider: ScriptedProvider, ask: Ask, status: int, kind: str, code: str | None) -> None:
    provider.says({"type": "error", "error": {"type": kind, "message": "No, sk-secret-1."}}, status)
    provider.says({"data": [{"type": "model", "id": "claude-x"}]})
    with pytest.raises(CloudFailure) as raised:
        ask(NATIVE)
    failure = raised.value
    assert (failure.kind, failure.error.status, failure.error.code) == ("refused", status, code)
    assert "secret" not in failure.error.message
    assert ("claude-x" in failure.error.message) == (status == 404)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 7),
        ("n", 2),
        ("logprobs", True),
        ("logit_bias", {"5": 1}),
        ("structured_outputs", {"regex": "a"}),
        ("response_format", {"type": "json_object"}),
        ("brand_new", 1),
        ("messages", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]),
        ("tool_choice", {"type": "custom", "custom": {"name": "f"}}),
    ],
)
def test_unsupported_features_are_refused_by_name(provider: ScriptedProvider, ask: Ask, field: str, value: Any) -> None:
    with pytest.raises(CloudFailure) as raised:
        ask(NATIVE, **{"tools": [TOOL], field: value})
    assert (raised.value.kind, raised.value.error.status, raised.value.unbilled) == ("refused", 400, True)
    assert raised.value.error.param is not None
    assert not provider.asked


def test_empty_conversations_vendors_tools_and_hints(provider: ScriptedProvider, ask: Ask) -> None:
    provider.says(MESSAGE)
    hints = {"think": True, "client_metadata": {}, "metadata": {}, "cache_control": {"type": "ephemeral"}}
    ask(NATIVE, messages=[{"role": "user", "content": ""}], tools=[{"type": "web_search"}, TOOL], **hints)
    sent = provider.asked[0].body
    assert sent["messages"] == [{"role": "user", "content": [{"type": "text", "text": "."}]}]
    assert [tool["name"] for tool in sent["tools"]] == ["weather"]
    assert sent["output_config"] == {"effort": "medium"} and sent["cache_control"] == hints["cache_control"]
    assert not {"think", "client_metadata"} & set(sent)


def test_other_endpoints_and_drafts_are_not_its_own(provider: ScriptedProvider, ask: Ask) -> None:
    with pytest.raises(CloudFailure, match="only chat completions"):
        ask(NATIVE, "completions", prompt="x")
    with pytest.raises(ConfigurationError, match="takes no drafts"):
        RouterConfig(cloud_url=provider.url, cloud_model="m", send_drafts=True, **NATIVE)
    assert not provider.asked


def test_a_stream_and_an_answer_through_the_client(provider: ScriptedProvider) -> None:
    asked: dict[str, Any] = {"model": "cloud", "messages": [{"role": "user", "content": "Hi"}]}
    with updraft.OpenAI(
        local=None, cloud_url=provider.url, cloud_provider="anthropic", cloud_model="m", cloud_api_key="sk-secret-1"
    ) as client:
        provider.says(MESSAGE)
        told: Any = client.chat.completions.create(**asked, user="ann", metadata={"a": "b"}, service_tier="flex")
        assert told.updraft["notes"] == ["metadata, service_tier: no effect"], "the user has one"
        provider.says(events(*STREAM))
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        provider.says(MESSAGE)
        whole = client.chat.completions.create(**asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == [34]
    assert whole.choices[0].message.content == "Take a coat."
    assert whole.model_extra is not None and whole.model_extra["updraft"]["tier"] == "cloud"


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ("[1]", {"raw_arguments": "[1]"}),
        ('"Oslo"', {"raw_arguments": '"Oslo"'}),
        ("{bad", {"raw_arguments": "{bad"}),
        ("", {}),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_arguments_become_objects(
    daemon: str, provider: ScriptedProvider, path: str, arguments: Any, sent: Any
) -> None:
    provider.says(MESSAGE)
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    said: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    body: dict[str, Any] = {"messages": [*said, {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]}
    if path == "/v1/responses":
        made = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": arguments}
        body = {"input": [said[0], made, {"type": "function_call_output", "call_id": "call_1", "output": "rain"}]}
    reply = httpx.post(f"{daemon}{path}", json={"model": "cloud", **body}, timeout=60)
    assert reply.status_code == 200, reply.text
    assert [block["input"] for block in blocks_of(provider) if block["type"] == "tool_use"] == [sent]
    notes = reply.json()["updraft"].get("notes", [])
    assert any("are not a JSON object" in note for note in notes) == ("raw_arguments" in sent), notes


@pytest.mark.parametrize(
    ("given", "roles"),
    [
        (["user"], ["user"]),
        (["user", "assistant", "user"], ["user", "assistant", "user"]),
        (["assistant"], ["user", "assistant"]),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_blank_message_of_the_user(
    daemon: str, provider: ScriptedProvider, path: str, given: list[str], roles: list[str]
) -> None:
    provider.says(MESSAGE)
    messages = [{"role": role, "content": "Yes." if role == "assistant" else " "} for role in given]
    reply = httpx.post(f"{daemon}{path}", json={"model": "cloud", "messages": messages, "max_tokens": 9}, timeout=60)
    assert reply.status_code == 200, reply.text
    assert [turn["role"] for turn in provider.asked[-1].body["messages"]] == roles
    assert all(block["text"].strip() for block in blocks_of(provider))
    assert any("blank message" in note for note in reply.json()["updraft"]["notes"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("requested", [["END"], ["other"], None])
def test_the_stop_sequence_reaches_the_caller(
    daemon: str, provider: ScriptedProvider, stream: bool, requested: list[str] | None
) -> None:
    ended = {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    start, *middle = STREAM[:1] + STREAM[5:9]
    last = [{"type": "message_delta", "delta": ended, "usage": {"output_tokens": 3}}, {"type": "message_stop"}]
    provider.says(events(start, *middle, *last) if stream else {**MESSAGE, **ended})
    asked = {
        "model": "cloud",
        "max_tokens": 9,
        "stop_sequences": requested,
        "messages": [{"role": "user", "content": "x"}],
    }
    reply = httpx.post(f"{daemon}/v1/messages", json={**asked, "stream": stream}, timeout=60)
    assert '"stop_reason":"stop_sequence","stop_sequence":"END"' in reply.text.replace(" ", "")


def begun(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def piece(index: int, kind: str, **text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **text}}


def ended(*indices: int) -> list[dict[str, Any]]:
    return [{"type": "content_block_stop", "index": index} for index in indices]


def streamed_message(daemon: str, provider: ScriptedProvider, *middle: dict[str, Any]) -> Any:
    provider.says(events(STREAM[0], *middle, *STREAM[-2:]))
    asked: dict[str, Any] = {"model": "cloud", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    with anthropic.Anthropic(base_url=daemon, api_key="k").messages.stream(**asked) as stream:
        return stream.get_final_message()


def test_the_text_at_the_start_of_a_signed_thought_is_kept(daemon: str, provider: ScriptedProvider) -> None:
    thought = begun(0, type="thinking", thinking="It ", signature="")
    rest = [piece(0, "thinking_delta", thinking="rains."), piece(0, "signature_delta", signature="s")]
    message = streamed_message(daemon, provider, thought, *rest, *ended(0), *STREAM[5:10])
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[0].signature) == ("It rains.", "s")
    provider.says(events(STREAM[0], thought, *rest, *ended(0), *STREAM[5:10], *STREAM[-2:]))
    asked = {"model": "cloud", "messages": [{"role": "user", "content": "x"}], "stream": True}
    reply = httpx.post(f"{daemon}/v1/chat/completions", json=asked, timeout=60)
    assert '"thinking":"It rains.","signature":"s"' in reply.text


def test_blocks_that_alternate(daemon: str, provider: ScriptedProvider) -> None:
    message = streamed_message(
        daemon,
        provider,
        begun(0, type="text", text=""),
        begun(1, type="tool_use", id="t1", name="f", input={}),
        begun(2, type="tool_use", id="t2", name="g", input={}),
        piece(1, "input_json_delta", partial_json='{"a"'),
        piece(0, "text_delta", text="One "),
        piece(2, "input_json_delta", partial_json='{"b":'),
        piece(1, "input_json_delta", partial_json=":1}"),
        piece(2, "input_json_delta", partial_json="2}"),
        *ended(1, 2),
        piece(0, "text_delta", text="two."),
        *ended(0),
    )
    shown = [getattr(block, "input", None) or block.text for block in message.content]
    assert shown == [{"a": 1}, {"b": 2}, "One two."]


def test_the_count_at_the_start_of_a_stream_is_not_the_answers(provider: ScriptedProvider) -> None:
    with updraft.OpenAI(local=None, cloud_url=provider.url, cloud_provider="anthropic", cloud_model="m") as client:
        silent = [{**event, "usage": {}} if event["type"] == "message_delta" else event for event in STREAM]
        provider.says(events(*silent))
        asked: Any = {"model": "cloud", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        chunks = list(client.chat.completions.create(**asked, stream_options={"include_usage": True}))
    reported = [chunk.usage.model_dump(exclude_unset=True) for chunk in chunks if chunk.usage]
    assert all("completion_tokens" not in usage or usage["completion_tokens"] > 1 for usage in reported), reported


@pytest.mark.parametrize("stream", [False, True])
def test_all_iterations_are_billed(provider: ScriptedProvider, ask: Ask, stream: bool) -> None:
    """The outer counts leave out the iterations that compact the context."""
    steps = [
        {"type": "compaction", "input_tokens": 1000, "cache_read_input_tokens": 300, "output_tokens": 50},
        {"type": "message", "input_tokens": 20, "cache_creation_input_tokens": 4, "output_tokens": 7},
    ]
    usage = {"input_tokens": 20, "cache_creation_input_tokens": 4, "output_tokens": 7, "iterations": steps}
    ended = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}
    provider.says(events(*STREAM[:-2], ended, STREAM[-1]) if stream else {**MESSAGE, "usage": usage})
    answer = ask(NATIVE, stream=stream)
    counts = ReportedUsage.of(answer[-1] if stream else answer)
    assert counts == ReportedUsage(1324, 57, cached_tokens=300, stored_tokens=4)


OWN: dict[str, Any] = {
    "model": "cloud",
    "max_tokens": 9000,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
                {"type": "text", "text": "I look."},
                {"type": "redacted_thinking", "data": "c2VjcmV0"},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no city", "is_error": True},
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
    "tools": [
        {"name": "weather", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}, "strict": True}
    ],
    "thinking": {"type": "enabled", "budget_tokens": 5000},
    "service_tier": "standard_only",
    "metadata": {"user_id": "u1"},
    "cache_control": {"type": "ephemeral"},
    "stop_sequences": ["END"],
    "temperature": 1.0,
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_in_the_clouds_own_api_stays_as_it_is(daemon: str, provider: ScriptedProvider, stream: bool) -> None:
    more = {"stream": True} if stream else {}
    provider.says(events(*STREAM) if stream else MESSAGE)
    headers = {"anthropic-version": "2023-01-01", "anthropic-beta": "context-1m-2025-08-07"}
    reply = httpx.post(f"{daemon}/v1/messages", json=OWN | more, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    assert provider.asked[-1].body == {**OWN, "model": "m", **more}
    assert provider.asked[-1].headers["anthropic-beta"] == "context-1m-2025-08-07"
    assert provider.asked[-1].headers["anthropic-version"] == "2023-06-01"


def test_cache_hints_of_chat_callers_are_forwarded(daemon: str, provider: ScriptedProvider) -> None:
    provider.says(MESSAGE)
    hint = {"cache_control": {"type": "ephemeral"}}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}, **hint}
    image = {"type": "image_url", "image_url": {"url": IMAGE}}
    messages: list[Any] = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "system", "content": [{"type": "text", "text": "Be kind.", **hint}]},
        {"role": "user", "content": [{"type": "text", "text": "Hi", **hint}, image | hint]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain", **hint}]},
    ]
    body = {"model": "cloud", "messages": messages, "tools": [TOOL | hint]}
    reply = httpx.post(f"{daemon}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    sent = provider.asked[-1].body
    assert sent["system"] == [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind.", **hint}]
    assert [tool.get("cache_control") for tool in sent["tools"]] == [hint["cache_control"]]
    user, said, result = [turn["content"] for turn in sent["messages"]]
    assert all(block["cache_control"] == hint["cache_control"] for block in (*user, *said, *result))
    assert result[0]["content"] == [{"type": "text", "text": "rain"}]


def test_hints_that_the_cloud_gets_are_not_noted(daemon: str, provider: ScriptedProvider) -> None:
    asked = {**OWN, "context_management": {"edits": []}, "client_metadata": {}, "temperature": 0}
    asked["thinking"] = {**OWN["thinking"], "display": "omitted"}
    for headers, noted in (
        ({"anthropic-beta": "context-management-2025-06-27"}, ["client_metadata"]),
        ({}, ["client_metadata", "context_management"]),
    ):
        provider.says(MESSAGE)
        reply = httpx.post(f"{daemon}/v1/messages", json=asked, headers=headers, timeout=60).json()
        assert ("context_management" in provider.asked[-1].body) == bool(headers)
        assert reply["updraft"]["notes"] == [f"{name}: no effect" for name in noted]


def test_only_unacceptable_parts_of_an_own_request_change(daemon: str, provider: ScriptedProvider) -> None:
    provider.says(MESSAGE)
    asked = json.loads(json.dumps(OWN))
    asked["tools"] += [{"type": "web_search_20250305", "name": "web_search"}]
    asked["messages"][1]["content"][3]["id"] = asked["messages"][2]["content"][0]["tool_use_id"] = "functions.weather:0"
    asked["messages"][1]["content"][0]["signature"] = ""
    asked["messages"].insert(1, {"role": "assistant", "content": [{"type": "text", "text": "\n"}]})
    assert httpx.post(f"{daemon}/v1/messages", json=asked, timeout=60).status_code == 200
    _, said, result = OWN["messages"]
    use = {**said["content"][3], "id": "functions_weather_0"}
    failed = {**result["content"][0], "tool_use_id": "functions_weather_0"}
    first = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    changed = [
        first,
        {**said, "content": [*said["content"][1:3], use]},
        {**result, "content": [failed, result["content"][1]]},
    ]
    assert provider.asked[-1].body == {**OWN, "model": "m", "messages": changed}


NAMES = ("fs.read", "a_x2e_b", "mcp__server/tool:x", "\u00e9_.", "f" * 128)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_tools_are_escaped_and_come_back(daemon: str, provider: ScriptedProvider, ask: Ask, name: str) -> None:
    tool = {"type": "function", "function": {**TOOL["function"], "name": name}}
    call = {**CALL, "function": {**CALL["function"], "name": name}}
    turns = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": ""},
    ]
    choice = {"type": "function", "function": {"name": name}}
    sent: str = ""
    for stream in (False, True):
        block = {"type": "tool_use", "id": "toolu_1", "name": sent, "input": {}}
        anthropic_says(provider, [block], "tool_use", stream=stream)
        told = ask(NATIVE, messages=turns, tools=[tool], tool_choice=choice, stream=stream)
        body = provider.asked[-1].body
        sent = body["tools"][0]["name"]
        assert re.fullmatch("[A-Za-z0-9_-]{1,128}", sent)
        assert sent == body["tool_choice"]["name"] == blocks_of(provider)[1]["name"]
    called = [call["function"].get("name") for calls in deltas(told, "tool_calls") for call in calls]
    assert called[0] == name
    provider.says({**MESSAGE, "content": [{"type": "tool_use", "id": "toolu_1", "name": sent, "input": {}}]})
    own = {"name": name, "input_schema": {"type": "object"}}
    asked = {"model": "cloud", "max_tokens": 9, "messages": [USER], "tools": [own]}
    asked["tool_choice"] = {"type": "tool", "name": name}
    answer = httpx.post(f"{daemon}/v1/messages", json=asked, timeout=60).json()
    assert provider.asked[-1].body["tools"] == [{**own, "name": sent}]
    assert provider.asked[-1].body["tool_choice"] == {"type": "tool", "name": sent}
    assert answer["content"][0]["name"] == name


USER = {"role": "user", "content": "Hi"}


def result(identifier: str, text: str = "rain") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identifier, "content": text}


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([result("call_9"), USER], ["text rain", "text Hi"]),
        ([USER, "call_1", USER], ["text Hi", "use call_1", "result call_1 No result.", "text Hi"]),
        ([USER, "call_1"], ["text Hi", "use call_1", "result call_1 No result."]),
        ([USER, "call_1", result("call_1"), result("call_1", "sun")],
         ["text Hi", "use call_1", "result call_1 rain", "text sun"]),
        ([USER, "call_1", USER, "call_1", result("call_1")],
         ["text Hi", "use call_1", "result call_1 No result.", "text Hi", "use ", "result  rain"]),
    ],
)  # fmt: skip
def test_calls_and_results_match(
    daemon: str, provider: ScriptedProvider, turns: list[Any], expected: list[str]
) -> None:
    provider.says(MESSAGE)
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    messages = [calls if turn == "call_1" else turn for turn in turns]
    asked = {"model": "cloud", "messages": messages, "tools": [TOOL]}
    answer = httpx.post(f"{daemon}/v1/chat/completions", json=asked, timeout=60).json()
    assert "messages: tool calls and results that do not match were repaired" in answer["updraft"]["notes"]
    assert [shown(block) for block in blocks_of(provider)] == expected


def shown(block: dict[str, Any]) -> str:
    """A block in words, without made IDs."""
    if block["type"] == "text":
        return f"text {block['text']}"
    if block["type"] == "tool_use":
        return f"use {block['id'] if block['id'] == 'call_1' else ''}"
    content = block["content"] if isinstance(block["content"], str) else block["content"][0]["text"]
    return f"result {block['tool_use_id'] if block['tool_use_id'] == 'call_1' else ''} {content}"


def test_results_come_before_the_text_of_their_turn(daemon: str, provider: ScriptedProvider) -> None:
    provider.says(MESSAGE)
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    asked = {"model": "cloud", "messages": [USER, calls, USER, result("call_1")], "tools": [TOOL]}
    answer = httpx.post(f"{daemon}/v1/chat/completions", json=asked, timeout=60).json()
    assert "notes" not in answer["updraft"]
    assert [block["type"] for block in blocks_of(provider)] == ["text", "tool_use", "tool_result", "text"]
