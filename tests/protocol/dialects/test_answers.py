"""Answers cut anywhere into chunks: the events and the completion that they make are those of the whole answer."""

from __future__ import annotations

import json
from typing import Any

from completions import CALLS, JSON, REASONS, TEXTS, chunks_of, completion
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response
from updraft.protocol.dialects.chat_chunks import ChatChunks
from updraft.protocol.dialects.responses_events import ResponseEvents, begun_response, whole_response
from updraft.protocol.dialects.responses_request import ResponsesRequest


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


def test_empty_strings_replace_no_values() -> None:
    chunks = ChatChunks()
    for chunk in chunks_of(completion("", "", [("read", "{}")], "tool_calls"), 1):
        for call in chunk["choices"][0]["delta"].get("tool_calls", ()) if chunk["choices"] else ():
            call["function"] = {"name": "", **call["function"]}
            chunk["choices"][0]["delta"]["tool_calls"] = [{"id": "", "type": "", **call}]
        chunks.read({**chunk, "model": chunk["model"] if chunk["choices"] else ""})
    made = chunks.whole()
    call = {"id": "call_0", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    assert (made["model"], made["choices"][0]["message"]["tool_calls"]) == ("m", [call])


def test_items_end_in_order_before_the_next_item_begins() -> None:
    def piece(index: int, arguments: str, **begun: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, **begun, "function": {"name": "read", "arguments": arguments}}]}

    first = [piece(0, "", id="a"), piece(0, "{"), piece(0, "}")]
    alternating = [piece(1, "", id="b"), piece(2, "", id="c"), piece(2, "{}"), piece(1, "{}")]
    custom = {"tool_calls": [{"index": 4, "id": "e", "type": "custom", "custom": {"name": "patch", "input": "x"}}]}
    rest = [{"reasoning_content": "Hm."}, {"content": "So."}, piece(3, "{}", id="d"), custom, piece(5, "{}", id="f")]
    events = ResponseEvents(begun_response(ResponsesRequest(model="m"), stored=False))
    made = list[bytes]()
    for delta in [*first, *alternating, *rest]:
        made += events.read({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    made += events.read({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}) + events.end()
    payloads = [json.loads(event.partition(b"data: ")[2]) for event in made]
    items = [
        (payload["type"].rpartition(".")[2], payload["output_index"])
        for payload in payloads
        if payload["type"].startswith("response.output_item")
    ]
    alternate = [("added", 1), ("added", 2), ("done", 1), ("done", 2)]
    one_by_one = [(kind, index) for index in range(3, 8) for kind in ("added", "done")]
    assert items == [("added", 0), ("done", 0), *alternate, *one_by_one]
    arguments = [item["arguments"] for item in events.response["output"] if item["type"] == "function_call"]
    assert arguments == ["{}"] * 5


@given(st.lists(st.dictionaries(st.sampled_from(["choices", "usage", "model"]), JSON, max_size=3), max_size=4))
def test_odd_chunks_break_nothing(chunks: list[dict[str, Any]]) -> None:
    events, collected = ResponseEvents(begun_response(ResponsesRequest(model="m"), stored=False)), ChatChunks()
    for chunk in chunks:
        events.read(chunk)
        collected.read(chunk)
    events.end()
    assert events.response["status"] in ("completed", "incomplete", "failed")
    assert collected.whole()["object"] == "chat.completion"
