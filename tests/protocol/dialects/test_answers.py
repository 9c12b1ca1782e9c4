"""Answers cut anywhere into chunks: the events and the completion that they make are those of the whole answer."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response
from updraft.protocol.dialects.chat_chunks import ChatChunks
from updraft.protocol.dialects.responses_events import ResponseEvents, begun_response, whole_response
from updraft.protocol.dialects.responses_request import ResponsesRequest

TEXTS = st.text(max_size=8)
CALLS = st.lists(st.tuples(st.text(min_size=1, max_size=4), TEXTS), max_size=3)
REASONS = st.sampled_from(["stop", "length", "tool_calls", "content_filter"])


def completion(reasoning: str, content: str, calls: list[tuple[str, str]], finish_reason: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def chunks_of(whole: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """The same as a server would stream it, `size` characters at a time."""
    choice = whole["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        text = message.get(name) or ""
        deltas += [{name: text[begin : begin + size]} for begin in range(0, len(text), size)]
    for index, call in enumerate(message.get("tool_calls", ())):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        deltas.append({"tool_calls": [{**call, "index": index, "function": {"name": name, "arguments": ""}}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": arguments[begin : begin + size]}}]}
            for begin in range(0, len(arguments), size)
        ]
    frame = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunks = [{**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    return [*chunks, {**frame, "choices": [end]}, {**frame, "choices": [], "usage": whole["usage"]}]


def bare(response: dict[str, Any]) -> dict[str, Any]:
    """Without ids and times, which differ."""
    output = [{**item, "id": ""} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": output}


@given(TEXTS, TEXTS, CALLS, REASONS, st.integers(1, 5))
def test_a_cut_answer_is_the_same_response(
    reasoning: str, content: str, calls: list[tuple[str, str]], reason: str, size: int
) -> None:
    whole = completion(reasoning, content, calls, reason)
    asked = ResponsesRequest(model="m", input="x")
    expected = whole_response(begun_response(asked, stored=False), whole)
    Response.model_validate(expected)
    events = ResponseEvents(begun_response(asked, stored=False))
    begun = events.begin()
    read = [event for chunk in chunks_of(whole, size) for event in events.read(chunk)]
    made = [*begun, *read, *events.end()]
    assert bare(events.response) == bare(expected)
    payloads = [json.loads(event.partition(b"data: ")[2]) for event in made]
    assert [payload["sequence_number"] for payload in payloads] == list(range(len(made)))
    opened = [payload for payload in payloads if payload["type"] == "response.output_item.added"]
    closed = [payload for payload in payloads if payload["type"] == "response.output_item.done"]
    assert [payload["output_index"] for payload in opened] == list(range(len(expected["output"])))
    assert [payload["item"] for payload in sorted(closed, key=lambda each: each["output_index"])] == events.response[
        "output"
    ]
    deltas = [payload for payload in payloads if payload["type"].endswith(".delta")]
    assert "".join(payload["delta"] for payload in deltas) == reasoning + content + "".join(call[1] for call in calls)


@given(TEXTS, TEXTS, CALLS, REASONS, st.integers(1, 5))
def test_a_cut_answer_is_the_same_completion(
    reasoning: str, content: str, calls: list[tuple[str, str]], reason: str, size: int
) -> None:
    whole = completion(reasoning, content, calls, reason)
    chunks = ChatChunks()
    for chunk in chunks_of(whole, size):
        chunks.read(chunk)
    made = chunks.whole()
    message = made["choices"][0]["message"]
    assert {
        **made,
        "choices": [{**made["choices"][0], "message": {**message, "content": message["content"] or None}}],
    } == whole


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "delta", "index", "content", "tool_calls", "function", "logprobs", "usage", "id"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(st.sampled_from(["choices", "usage", "model"]), JSON, max_size=3), max_size=4))
def test_odd_chunks_break_nothing(chunks: list[dict[str, Any]]) -> None:
    events, collected = ResponseEvents(begun_response(ResponsesRequest(model="m"), stored=False)), ChatChunks()
    for chunk in chunks:
        events.read(chunk)
        collected.read(chunk)
    events.end()
    assert events.response["status"] in ("completed", "incomplete", "failed")
    assert collected.whole()["object"] == "chat.completion"
