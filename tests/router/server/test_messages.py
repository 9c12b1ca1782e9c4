"""Anthropic's Messages API through the real anthropic client and the daemon: texts, tools, streams, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message
from router_fakes import CLOUD_TEXT, LOCAL_TEXT, FakeCloud, ScriptedGates, ScriptedLocal, tiers
from scripted_cloud import cloud_says, cloud_streams
from serving import serving
from updraft.protocol.dialects.messages_request import read_messages_request
from updraft.router.config import RouterConfig
from updraft.router.router import Router
from updraft.router.server.app import daemon_app

TOOL: Any = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": ["string", "null"]}}},
}
VENDOR_TOOL: Any = {"type": "web_search_20250305", "name": "web_search"}
CALL = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
HELLO: Any = {"max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def local() -> ScriptedLocal:
    return ScriptedLocal()


@pytest.fixture
def client(cloud: FakeCloud, local: ScriptedLocal) -> Iterator[anthropic.Anthropic]:
    config = RouterConfig(local="pocket", cloud_url=cloud.url, cloud_model="pocket-large")
    app = daemon_app(Router(config, tiers(local, config, ScriptedGates())), api_key="secret")
    with (
        serving(app, lifespan=True) as url,
        anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0) as client,
    ):
        yield client


def checked(message: Message) -> Message:
    """The message, which is one as anthropic's own types want it."""
    return Message.model_validate(message.to_dict())


def test_a_message_with_its_reason(client: anthropic.Anthropic, local: ScriptedLocal) -> None:
    message = checked(client.messages.create(model="auto", system="Be brief.", **HELLO))
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": LOCAL_TEXT}]
    assert (message.model, message.stop_reason) == ("fake-small", "end_turn")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (2, 5), "of 7; Anthropic counts the cached ones apart"
    assert message.model_extra and message.model_extra["updraft"]["route"] == "local"
    assert [(each.role, each.text) for each in local.calls[0][0]] == [("system", "Be brief."), ("user", "hello")]
    assert checked(client.messages.create(model="local", **{**HELLO, "max_tokens": 2})).stop_reason == "max_tokens"


@pytest.mark.parametrize(("model", "text"), [("local", LOCAL_TEXT), ("cloud", CLOUD_TEXT)])
def test_the_events_of_a_text(client: anthropic.Anthropic, model: str, text: str) -> None:
    with client.messages.stream(model=model, **HELLO) as stream:
        kinds = [event.type for event in stream if event.type not in ("text", "content_block_delta")]
        message = checked(stream.get_final_message())
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert "".join(block.text for block in message.content if block.type == "text") == text
    assert message.stop_reason == "end_turn" and message.usage.output_tokens > 0 < message.usage.input_tokens


@pytest.mark.parametrize("model", ["local", "cloud"])
def test_a_stream_begins_with_the_tokens_of_its_prompt(client: anthropic.Anthropic, model: str) -> None:
    """Counted by the device's tokenizer (a token per word, and one per message), or estimated for a cloud."""
    messages: Any = [{"role": "user", "content": "hello " * 40}]
    with client.messages.stream(model=model, **{**HELLO, "messages": messages}) as stream:
        begun: Any = next(iter(stream))
    assert begun.type == "message_start"
    assert begun.message.usage.input_tokens == (len("hello " * 40) + 1 if model == "local" else 61)


def test_blocks_of_vendors_tools_are_left_out_with_a_note(client: anthropic.Anthropic, cloud: FakeCloud) -> None:
    search: list[Any] = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "It rains."},
    ]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "x"}]}
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    question = HELLO["messages"][0]
    messages: Any = [question, {"role": "assistant", "content": [*search, call]}, {"role": "user", "content": [result]}]
    message = client.messages.create(model="cloud", **{**HELLO, "messages": messages})
    assert [each["content"] for each in cloud.requests[-1]["messages"]] == ["hello", "It rains.", ""]
    assert message.model_extra
    notes = message.model_extra["updraft"]["notes"]
    assert [note.partition(": ")[0] for note in notes] == ["messages[1].content[0]", "messages[1].content[1]"]


def test_blocks_of_other_types_become_text_or_are_left_out(client: anthropic.Anthropic, cloud: FakeCloud) -> None:
    text = [{"type": "text", "text": "It rains."}]
    search = {"type": "search_result", "source": "https://a.example", "title": "Weather", "content": text}
    said = [{"type": "fallback", "from": {"model": "m"}}, *text]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [search]}
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": {}}
    asked = [search, {"type": "mcp_tool_listing", "tools": []}]
    turns = [("user", asked), ("assistant", [*said, call]), ("user", [result])]
    messages: Any = [{"role": role, "content": content} for role, content in turns]
    message = client.messages.create(model="cloud", **{**HELLO, "messages": messages})
    shown = "Weather\nhttps://a.example\nIt rains."
    assert [each["content"] for each in cloud.requests[-1]["messages"]] == [shown, "It rains.", shown]
    assert message.model_extra
    notes = message.model_extra["updraft"]["notes"]
    assert [note.partition(": ")[0] for note in notes] == ["messages[0].content[1]", "messages[1].content[0]"]
    video: Any = [{"type": "video"}]
    with pytest.raises(anthropic.BadRequestError, match="content blocks of type 'video'"):
        client.messages.create(model="cloud", **{**HELLO, "messages": [{"role": "user", "content": video}]})


def test_a_tool_round_trip(client: anthropic.Anthropic, cloud: FakeCloud) -> None:
    options: Any = {"model": "cloud", "max_tokens": 4000, "tools": [TOOL], "stop_sequences": ["END"]}
    question: Any = {"role": "user", "content": "weather?"}
    cloud_says(cloud, {"content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]}, "tool_calls")
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    thinking: Any = {"type": "enabled", "budget_tokens": 2000}
    first = checked(client.messages.create(messages=[question], tool_choice=choice, thinking=thinking, **options))
    assert [block.type for block in first.content] == ["thinking", "tool_use"]
    assert first.content[1].to_dict() == {
        "type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}
    }  # fmt: skip
    assert first.stop_reason == "tool_use"
    sent = cloud.requests[-1]
    assert sent["tools"][0]["function"] == {"name": "weather", "parameters": TOOL["input_schema"]}
    assert (sent["tool_choice"], sent["parallel_tool_calls"], sent["stop"]) == ("required", False, ["END"])
    assert (sent["reasoning_effort"], sent["max_completion_tokens"]) == ("low", 4000)

    cloud_says(cloud, {"content": "Rain."})
    result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "none", "is_error": True}
    pixel = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    later: Any = [result, {"type": "image", "source": pixel}, {"type": "text", "text": "So?"}]
    replies: Any = [question, {"role": "assistant", "content": first.content}, {"role": "user", "content": later}]
    checked(client.messages.create(messages=replies, metadata={"user_id": "u"}, **options))
    sent = cloud.requests[-1]
    asked, answered, told, more = sent["messages"]
    assert (asked["content"], sent["user"]) == ("weather?", "u")
    assert answered["tool_calls"] == [{**CALL, "function": {"name": "weather", "arguments": '{"city":"Bern"}'}}]
    assert answered["reasoning_content"] == "Hm."
    assert told == {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: none"}
    assert more["content"][0]["image_url"]["url"] == "data:image/png;base64,iVBORw0KGgo="


SIGNED = [
    {"type": "thinking", "thinking": "I look.", "signature": "c2ln"},
    {"type": "redacted_thinking", "data": "c2VjcmV0"},
    {"type": "thinking", "thinking": "", "signature": "bW9yZQ=="},
]


@pytest.mark.parametrize("stream", [False, True])
def test_signed_thoughts_come_and_go(client: anthropic.Anthropic, cloud: FakeCloud, stream: bool) -> None:
    """As a cloud of Anthropic's API signs them; its provider reads and writes `thinking_blocks`."""
    options: Any = {"model": "cloud", "tools": [TOOL]}
    if stream:
        blocks = [{"thinking_blocks": [{"index": index, **block}]} for index, block in enumerate(SIGNED)]
        pieces = [{"reasoning_content": "I "}, {"reasoning_content": "look."}]
        cloud_streams(cloud, *pieces, *blocks, {"content": "So."}, finish_reason="stop")
        with client.messages.stream(**options, **HELLO) as events:
            message = checked(events.get_final_message())
    else:
        cloud_says(cloud, {"content": "So.", "reasoning_content": "I look.", "thinking_blocks": SIGNED})
        message = checked(client.messages.create(**options, **HELLO))
    assert [block.to_dict() for block in message.content] == [*SIGNED, {"type": "text", "text": "So."}]
    later: Any = [*HELLO["messages"], {"role": "assistant", "content": message.content}, *HELLO["messages"]]
    cloud_says(cloud, {"content": "Rain."})
    client.messages.create(**options, **{**HELLO, "messages": later})
    assert cloud.requests[-1]["messages"][1]["thinking_blocks"] == SIGNED


def test_parallel_calls_in_a_stream(client: anthropic.Anthropic, cloud: FakeCloud) -> None:
    second = {**CALL, "id": "toolu_2"}
    pieces = [{"index": 0, "function": {"arguments": part}} for part in ('{"city"', ': "Bern"}')]
    cloud_streams(
        cloud,
        {"role": "assistant", "reasoning_content": "Hm."},
        {"content": "I look."},
        {"tool_calls": [{**CALL, "index": 0, "function": {"name": "weather", "arguments": ""}}]},
        *({"tool_calls": [piece]} for piece in pieces),
        {"tool_calls": [{**second, "index": 1}]},
        finish_reason="tool_calls",
    )
    with client.messages.stream(model="cloud", tools=[TOOL], **HELLO) as stream:
        message = checked(stream.get_final_message())
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [(call.id, call.input) for call in calls] == [("toolu_1", {"city": "Bern"}), ("toolu_2", {"city": "Bern"})]
    assert message.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "high"),
        ({"thinking": {"type": "adaptive"}}, None),
        ({}, None),
    ],
)
def test_the_reasoning_switch_reaches_the_cloud(
    client: anthropic.Anthropic, cloud: FakeCloud, fields: dict[str, Any], effort: str | None
) -> None:
    client.messages.create(model="cloud", **HELLO, extra_body=fields)
    assert cloud.requests[-1].get("reasoning_effort") == effort


def test_errors_name_the_callers_switch_of_parallel_calls() -> None:
    request = read_messages_request({**HELLO, "model": "cloud", "tools": [TOOL]})
    assert request.names["parallel_tool_calls"] == "tool_choice.disable_parallel_tool_use"


def test_prefill_is_continued_and_the_stop_sequence_named(client: anthropic.Anthropic, local: ScriptedLocal) -> None:
    local.stop_reason = "END"
    begun: Any = [*HELLO["messages"], {"role": "assistant", "content": "one two"}]
    message = client.messages.create(model="local", max_tokens=9, messages=begun, stop_sequences=["END"])
    assert local.calls[0][2] is True, "the last message is continued"
    assert str(message.content[0].to_dict()["text"]).split() == LOCAL_TEXT.split()[2:]


def test_hints_have_notes_and_no_effect(client: anthropic.Anthropic, cloud: FakeCloud) -> None:
    hints: dict[str, Any] = {
        "tools": [VENDOR_TOOL, {**TOOL, "defer_loading": True}],
        "thinking": {"type": "adaptive", "display": "omitted"},
        "extra_body": {"context_management": {"edits": []}, "client_metadata": {"session": "1"}},
    }
    message = client.messages.create(model="cloud", **HELLO, **hints)
    assert message.model_extra
    assert [note.partition(":")[0] for note in message.model_extra["updraft"]["notes"]] == [
        "client_metadata", "context_management", "thinking.display", "tools[0]", "tools[1].defer_loading",
    ]  # fmt: skip
    assert [tool["function"]["name"] for tool in cloud.requests[-1]["tools"]] == ["weather"]
    counted = {**hints, "extra_body": hints["extra_body"]}
    assert client.messages.count_tokens(model="local", messages=HELLO["messages"], **counted).input_tokens > 0


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"tools": [VENDOR_TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [VENDOR_TOOL, TOOL], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"container": "c"}, "container"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_fields_without_a_chat_equivalent_are_refused_by_name(
    client: anthropic.Anthropic, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{"model": "local", **HELLO, **options})
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param


def test_errors_are_anthropics(client: anthropic.Anthropic, cloud: FakeCloud) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="gpt-9", **HELLO)
    assert unknown.value.type == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError) as keyless:
        client.with_options(api_key="wrong").messages.create(model="local", **HELLO)
    assert keyless.value.type == "authentication_error"
    cloud.mode = "cut"
    with pytest.raises(anthropic.APIStatusError) as broken, client.messages.stream(model="cloud", **HELLO) as stream:
        stream.get_final_message()
    assert broken.value.type == "api_error"


def test_tokens_are_counted_as_the_model_on_the_device_reads_them() -> None:
    app = daemon_app(Router(RouterConfig(local="pocket")))
    with (
        serving(app, lifespan=True) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        options: Any = {"model": "local", "system": "Be brief.", "messages": HELLO["messages"]}
        counted = client.messages.count_tokens(**options)
        assert counted.input_tokens == client.messages.create(**options, max_tokens=1).usage.input_tokens > 0
