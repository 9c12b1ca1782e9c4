"""Reasoning of several clouds through every dialect: callers see it in their own form, and the cloud gets it back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from provider_daemons import running_daemons
from scripted_provider import ScriptedProvider, anthropic_says, running_provider
from updraft.protocol.dialects.chat_chunks import blocks_of, restored, seal
from updraft.router.privacy.rules import Privacy

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")
Conversation = list[dict[str, Any]]


@pytest.fixture(scope="module")
def cloud() -> Iterator[ScriptedProvider]:
    with running_provider() as provider:
        yield provider


@pytest.fixture(scope="module")
def daemons(cloud: ScriptedProvider) -> Iterator[dict[str, str]]:
    """URLs of daemons, by the provider of their cloud."""
    with running_daemons(cloud, "openai", "anthropic", "gemini") as urls:
        yield urls


def ask(url: str, path: str, turns: Conversation, *, stream: bool) -> tuple[str, Conversation]:
    """Return the reasoning that the caller sees, and the turns with the answer and the result of each call."""
    tools: Any = {
        "/v1/responses": [{"type": "function", **FUNCTION}],
        "/v1/messages": [{"name": "weather", "input_schema": SCHEMA}],
    }.get(path, [{"type": "function", "function": FUNCTION}])
    body = {"model": "cloud", "tools": tools, "stream": stream, ("input" if "responses" in path else "messages"): turns}
    if path == "/v1/messages":
        body["max_tokens"] = 99
    reply = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines()] if stream else [reply.text]
    return READERS[path]([json.loads(line) for line in lines if line.startswith("{")], turns)


def of_chat(events: list[Any], turns: Conversation) -> tuple[str, Conversation]:
    """Assemble the message as clients do that keep the fields of Google, Anthropic and OpenRouter."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for choice in (choice for event in events for choice in event["choices"]):
        delta = choice.get("delta", choice.get("message"))
        for name in ("content", "reasoning_content", "reasoning"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for piece in delta.get("tool_calls") or ():
            if "id" in piece:
                message.setdefault("tool_calls", []).append(piece)
            else:
                message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        for name in ("thinking_blocks", "reasoning_details"):
            if delta.get(name):
                message[name] = message.get(name, []) + delta[name]
        message |= {name: delta[name] for name in ("extra_content", "deltas") if delta.get(name)}
    calls = message.get("tool_calls", [])
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
    seen = message.get("reasoning_content") or message.get("reasoning") or ""
    return seen, [*turns, message, *(results or [USER])]


def of_response(events: list[Any], turns: Conversation) -> tuple[str, Conversation]:
    output = events[-1].get("response", events[-1])["output"]
    calls = [item["call_id"] for item in output if item["type"] == "function_call"]
    results: Conversation = [{"type": "function_call_output", "call_id": each, "output": "rain"} for each in calls]
    parts = [part["text"] for item in output if item["type"] == "reasoning" for part in item["content"]]
    return "".join(parts), [*turns, *output, *(results or [USER])]


def of_message(events: list[Any], turns: Conversation) -> tuple[str, Conversation]:
    content: list[Any] = events[0].get("content") or []
    for event in events:
        if event["type"] == "content_block_start":
            content.append({**event["content_block"], "pieces": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], content[event["index"]]
            if "partial_json" in delta:
                block["pieces"] += delta["partial_json"]
            for name in ("text", "thinking", "signature"):
                block |= {name: block[name] + delta[name]} if name in delta else {}
            if "citation" in delta:
                block["citations"] = [*block.get("citations", ()), delta["citation"]]
    for block in content:
        if pieces := block.pop("pieces", ""):
            block["input"] = json.loads(pieces)
    calls = [block["id"] for block in content if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": each, "content": "rain"} for each in calls]
    thoughts = "".join(block["thinking"] for block in content if block["type"] == "thinking")
    return thoughts, [*turns, {"role": "assistant", "content": content}, {"role": "user", "content": results or "Hi"}]


def of_ollama(events: list[Any], turns: Conversation) -> tuple[str, Conversation]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for part in (event["message"] for event in events):
        for name in ("content", "thinking"):
            message[name] = message.get(name, "") + part.get(name, "")
        message |= {name: part[name] for name in part if name not in ("content", "thinking")}
    calls = message.get("tool_calls", [])
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
    return message["thinking"], [*turns, message, *(results or [USER])]


READERS: dict[str, Callable[[list[Any], Conversation], tuple[str, Conversation]]] = dict(
    zip(PATHS, (of_chat, of_response, of_message, of_ollama), strict=True)
)


def chunked(*deltas: dict[str, Any], finish: str) -> str:
    """A stream of chunks, one per delta."""
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    lines = [json.dumps({**head, "choices": [choice]}) for choice in choices]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])


def openai_says(cloud: ScriptedProvider, message: dict[str, Any], *, stream: bool) -> None:
    finish = "tool_calls" if "tool_calls" in message else "stop"
    if stream:
        thoughts = {name: value for name, value in message.items() if name not in ("content", "tool_calls")}
        calls = [{"tool_calls": [{"index": 0, **call}]} for call in message.get("tool_calls", ())]
        content = message["content"] if isinstance(message["content"], list) else [message["content"]]
        pieces = [{"content": [each] if isinstance(each, dict) else each} for each in content]
        cloud.says(chunked(*([thoughts] if thoughts else []), *pieces, *calls, finish=finish))
        return
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    cloud.says({"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})


YES = [{"type": "text", "text": "Yes."}]
DETAILS = [
    {"type": "reasoning.text", "text": "I look.", "signature": "c2ln", "format": "x", "index": 0},
    {"type": "reasoning.encrypted", "data": "c2VjcmV0", "id": "r1", "index": 1},
]
MISTRALS = [{"type": "thinking", "thinking": [{"type": "text", "text": "I look."}]}, {"type": "text", "text": "So."}]
#: Messages of clouds with OpenAI's API. Each cloud gets its own fields back.
SPELLED: dict[str, dict[str, Any]] = {
    "reasoning_content": {"reasoning_content": "I look.", "content": "So."},
    "reasoning": {"reasoning": "I look.", "content": "So."},
    "thinking": {"thinking": "I look.", "content": "So."},
    "parts": {"content": MISTRALS},
    "details": {"reasoning_details": DETAILS, "content": "So."},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", SPELLED)
def test_every_spelling(cloud: ScriptedProvider, daemons: dict[str, str], form: str, path: str, stream: bool) -> None:
    openai_says(cloud, SPELLED[form], stream=stream)
    seen, turns = ask(daemons["openai"], path, [USER], stream=stream)
    assert seen == "I look."
    openai_says(cloud, {"content": "Yes."}, stream=stream)
    ask(daemons["openai"], path, turns, stream=stream)
    said = cloud.asked[-1].body["messages"][1]
    expected = SPELLED[form]
    assert {name: said.get(name) for name in expected} == expected
    assert not {"reasoning_content", "thinking", "reasoning"} & said.keys() - expected.keys() or form == "details"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/chat"])
@pytest.mark.parametrize("has_text", [False, True])
def test_pieces_of_details_are_joined(
    cloud: ScriptedProvider, daemons: dict[str, str], path: str, has_text: bool
) -> None:
    first, second = DETAILS
    pieces = [{**first, "text": "I ", "signature": None}, {**first, "text": "look.", "signature": None}]
    signed = {"type": "reasoning.text", "signature": "c2ln", "index": 0}
    pieces += [{**signed, "text": ""} if has_text else signed, second]
    cloud.says(chunked(*({"reasoning_details": [each]} for each in pieces), {"content": "So."}, finish="stop"))
    _, turns = ask(daemons["openai"], path, [USER], stream=True)
    openai_says(cloud, {"content": "Yes."}, stream=False)
    ask(daemons["openai"], path, turns, stream=False)
    assert cloud.asked[-1].body["messages"][1]["reasoning_details"] == DETAILS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("called", [False, True])
def test_signatures_of_anthropic(
    cloud: ScriptedProvider, daemons: dict[str, str], path: str, stream: bool, called: bool
) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
    blocks = [
        {"type": "compaction", "content": "Before, we greeted."},
        {"type": "thinking", "thinking": "I look.", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "c2VjcmV0"},
        use if called else {"type": "text", "text": "So."},
    ]
    anthropic_says(cloud, blocks, "tool_use" if called else "end_turn", stream=stream)
    seen, turns = ask(daemons["anthropic"], path, [USER], stream=stream)
    assert seen == "I look."
    anthropic_says(cloud, YES, "end_turn", stream=False)
    ask(daemons["anthropic"], path, turns, stream=False)
    assert cloud.asked[-1].body["messages"][1]["content"] == blocks


ALTERNATING = [
    {"type": "text", "text": "I look."},
    {"type": "redacted_thinking", "data": "c2VjcmV0"},
    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
    {"type": "text", "text": "And "},
    {"type": "text", "text": "rain", "citations": [{"type": "char_location", "cited_text": "r"}]},
    {"type": "thinking", "thinking": "", "signature": "c2ln"},
    {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {}},
]
CHAT, RESPONSES, MESSAGES, _ = PATHS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_anthropic_gets_back_the_order(
    cloud: ScriptedProvider, daemons: dict[str, str], path: str, stream: bool
) -> None:
    anthropic_says(cloud, ALTERNATING, "tool_use", stream=stream)
    _, turns = ask(daemons["anthropic"], path, [USER], stream=stream)
    if path == MESSAGES:
        assert turns[1]["content"] == ALTERNATING
    if path == RESPONSES:
        kinds = ["message", "reasoning", "function_call", "message", "reasoning", "function_call"]
        assert [item["type"] for item in turns[1:7]] == kinds
    if path == CHAT and stream:
        return  # a client that joins deltas loses their order
    anthropic_says(cloud, YES, "end_turn", stream=False)
    ask(daemons["anthropic"], path, turns, stream=False)
    sent = cloud.asked[-1].body["messages"][1]["content"]
    if path == RESPONSES:  # joins texts, and has no citations of documents
        joined = {"type": "text", "text": "And rain"}
        assert sent == [*ALTERNATING[:3], joined, *ALTERNATING[5:]]
    else:
        assert sent == ALTERNATING
    openai_says(cloud, {"content": "Yes."}, stream=False)
    ask(daemons["openai"], path, turns, stream=False)
    assert not any("deltas" in message for message in cloud.asked[-1].body["messages"])


def test_deltas_that_the_caller_contradicts_are_ignored(cloud: ScriptedProvider, daemons: dict[str, str]) -> None:
    anthropic_says(cloud, ALTERNATING, "tool_use", stream=False)
    _, turns = ask(daemons["anthropic"], CHAT, [USER], stream=False)
    for changed in ({"content": "Snow."}, {"tool_calls": turns[1]["tool_calls"][:1]}):
        anthropic_says(cloud, YES, "end_turn", stream=False)
        ask(daemons["anthropic"], CHAT, [USER, turns[1] | changed], stream=False)
        sent = cloud.asked[-1].body["messages"][1]["content"]
        kinds = ["redacted_thinking", "thinking", "text", *(["tool_use"] * len((turns[1] | changed)["tool_calls"]))]
        assert [block["type"] for block in sent] == kinds
        assert sent[2]["text"] == (turns[1] | changed)["content"]


def test_privacy_rules_drop_deltas(cloud: ScriptedProvider) -> None:
    with running_daemons(cloud, "anthropic", privacy=Privacy(patterns={"mine": "aurora"})) as urls:
        anthropic_says(cloud, ALTERNATING, "tool_use", stream=False)
        _, turns = ask(urls["anthropic"], CHAT, [USER], stream=False)
        anthropic_says(cloud, YES, "end_turn", stream=False)
        ask(urls["anthropic"], CHAT, turns, stream=False)
    sent = cloud.asked[-1].body["messages"][1]["content"]
    assert [block["type"] for block in sent] == ["text", "tool_use", "tool_use"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("provider", ["gemini", "openai"])
@pytest.mark.parametrize("called", [False, True])
def test_signatures_of_google(
    cloud: ScriptedProvider, daemons: dict[str, str], path: str, stream: bool, provider: str, called: bool
) -> None:
    """In Google's own API, and in its API with OpenAI's form."""
    extra = {"extra_content": {"google": {"thought_signature": "c2ln/+=="}}}
    message: dict[str, Any] = {"content": "So.", **({"tool_calls": [CALL | extra]} if called else extra)}
    call = {"functionCall": {"id": "c1", "name": "weather", "args": {"city": "Oslo"}}}
    parts = [{"text": "So."}, call] if called else [{"text": "So."}]
    parts[-1] |= {"thoughtSignature": "c2ln/+=="}

    def says(parts: list[Any], message: dict[str, Any], *, stream: bool) -> None:
        if provider == "openai":
            openai_says(cloud, message, stream=stream)
            return
        body = {"candidates": [{"content": {"role": "model", "parts": parts}, "finishReason": "STOP"}]}
        cloud.says(f"data: {json.dumps(body)}\n\n" if stream else body)

    says([{"text": "I look.", "thought": True}, *parts], message, stream=stream)
    _, turns = ask(daemons[provider], path, [USER], stream=stream)
    says([{"text": "Yes."}], {"content": "Yes."}, stream=False)
    ask(daemons[provider], path, turns, stream=False)
    body = cloud.asked[-1].body
    if provider == "gemini":
        assert body["contents"][1]["parts"] == parts
        if called:
            assert body["contents"][2]["parts"][0]["functionResponse"]["id"] == "c1"
        return
    said = body["messages"][1]
    if called:
        assert [said["tool_calls"][0].get(name) for name in ("id", "extra_content")] == ["c1", extra["extra_content"]]
        assert body["messages"][2]["tool_call_id"] == "c1"
    else:
        assert said["extra_content"] == extra["extra_content"]


#: Parts with a signature each: texts, a call, a thought, and no text.
SIGNED_PARTS: list[dict[str, Any]] = [
    {"text": "I look.", "thoughtSignature": "UzE="},
    {"text": "So.", "thoughtSignature": "UzI="},
    {"functionCall": {"id": "c1", "name": "weather", "args": {"city": "Oslo"}}, "thoughtSignature": "UzM="},
    {"text": "", "thoughtSignature": "UzQ="},
    {"text": "Hm.", "thought": True, "thoughtSignature": "UzU="},
    {"functionCall": {"id": "c2", "name": "weather", "args": {}}},
    {"text": "Rain."},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_gemini_gets_back_each_signature(
    cloud: ScriptedProvider, daemons: dict[str, str], path: str, stream: bool
) -> None:
    body = {"candidates": [{"content": {"role": "model", "parts": SIGNED_PARTS}, "finishReason": "STOP"}]}
    cloud.says(f"data: {json.dumps(body)}\n\n" if stream else body)
    _, turns = ask(daemons["gemini"], path, [USER], stream=stream)
    if path == CHAT and stream:
        return  # a client that joins deltas loses their order
    cloud.says({"candidates": [{"content": {"parts": [{"text": "Yes."}]}, "finishReason": "STOP"}]})
    ask(daemons["gemini"], path, turns, stream=False)
    assert cloud.asked[-1].body["contents"][1]["parts"] == SIGNED_PARTS


def test_several_states_of_one_message_are_joined() -> None:
    states = ({"reasoning_details": [DETAILS[0]]}, {"reasoning_details": [DETAILS[1]]}, {"extra_content": {"x": 1}})
    blocks = [block for state in states for block in blocks_of(seal(state))]
    message = restored({"role": "assistant", "content": "So.", "thinking_blocks": blocks})
    assert message == {"role": "assistant", "content": "So.", "reasoning_details": DETAILS, "extra_content": {"x": 1}}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/chat"])
def test_states_that_the_caller_changed_are_left_out(
    cloud: ScriptedProvider, daemons: dict[str, str], path: str
) -> None:
    openai_says(cloud, {"reasoning_details": DETAILS, "content": "So.", "tool_calls": [CALL]}, stream=False)
    _, turns = ask(daemons["openai"], path, [USER], stream=False)
    changed = json.loads(json.dumps(turns).replace("updraft-state-1.", "updraft-state-1.%"))
    openai_says(cloud, {"content": "Yes."}, stream=False)
    ask(daemons["openai"], path, changed, stream=False)
    said = cloud.asked[-1].body["messages"][1]
    assert said["tool_calls"] == [CALL]
    assert not {"thinking_blocks", "reasoning_details"} & said.keys()
