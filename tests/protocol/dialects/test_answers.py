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


@given(st.lists(st.dictionaries(st.sampled_from(["choices", "usage", "model"]), JSON, max_size=3), max_size=4))
def test_odd_chunks_break_nothing(chunks: list[dict[str, Any]]) -> None:
    events, collected = ResponseEvents(begun_response(ResponsesRequest(model="m"), stored=False)), ChatChunks()
    for chunk in chunks:
        events.read(chunk)
        collected.read(chunk)
    events.end()
    assert events.response["status"] in ("completed", "incomplete", "failed")
    assert collected.whole()["object"] == "chat.completion"
