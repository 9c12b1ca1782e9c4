"""Anthropic's and Ollama's words: answers cut anywhere are the same, and no request breaks the translation."""

from __future__ import annotations

import json
import random
from typing import Any

from completions import CALLS, JSON, REASONS, TEXTS, chunks_of, completion
from hypothesis import given
from hypothesis import strategies as st
from updraft.protocol.dialects.chat_chunks import ChatChunks
from updraft.protocol.dialects.messages_events import AnthropicEvents, whole_message
from updraft.protocol.dialects.messages_request import MessagesRequest, chat_body, read_messages_request
from updraft.protocol.dialects.ollama_answers import OllamaAnswer
from updraft.protocol.dialects.ollama_request import OllamaChat, read_ollama_request
from updraft.protocol.dialects.ollama_request import chat_body as ollama_chat_body
from updraft.protocol.errors import InvalidRequestError
from updraft.protocol.http.lenient_json import json_bytes

ASKED = MessagesRequest(model="m", messages=[], max_tokens=1)
OBJECTS = st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.text(max_size=3), max_size=2)
NAMED = st.lists(st.tuples(st.text(min_size=1, max_size=4), OBJECTS.map(json.dumps)), max_size=3)


@given(TEXTS, TEXTS, NAMED, REASONS, st.integers(1, 5))
def test_a_cut_answer_is_the_same_message(
    reasoning: str, content: str, calls: list[tuple[str, str]], reason: str, size: int
) -> None:
    whole = completion(reasoning, content, calls, reason)
    expected = decoded({**whole_message(ASKED, whole), "id": ""})
    events = AnthropicEvents(ASKED)
    made = [
        *events.begin(),
        *(event for chunk in chunks_of(whole, size) for event in events.read(chunk)),
        *events.end(),
    ]
    assert decoded({**events.message, "id": ""}) == expected
    assert [json.loads(arguments) for _, arguments in calls] == [
        block["input"] for block in expected["content"] if block["type"] == "tool_use"
    ]
    payloads = [json.loads(event.partition(b"data: ")[2]) for event in made]
    open_block: int | None = None
    for payload in payloads:  # one block is open at a time
        if payload["type"] == "content_block_start":
            assert open_block is None
            open_block = payload["index"]
        elif payload["type"].startswith("content_block"):
            assert payload["index"] == open_block
            open_block = None if payload["type"].endswith("stop") else open_block
    assert open_block is None
    deltas = [payload["delta"] for payload in payloads if payload["type"] == "content_block_delta"]
    said = "".join(delta.get("thinking") or delta.get("text") or delta.get("partial_json") or "" for delta in deltas)
    assert said == reasoning + content + "".join(arguments for _, arguments in calls)


@given(NAMED, st.randoms(use_true_random=False))
def test_calls_whose_pieces_alternate_are_whole_blocks(calls: list[tuple[str, str]], chance: random.Random) -> None:
    pieces = [[arguments[at : at + 2] for at in range(0, len(arguments), 2)] for _, arguments in calls]
    order = [index for index, each in enumerate(pieces) for _ in each]
    chance.shuffle(order)
    events, sent = AnthropicEvents(ASKED), list[bytes]()
    for index in dict.fromkeys(order):
        begun = {"index": index, "id": f"call_{index}", "function": {"name": calls[index][0], "arguments": ""}}
        sent += events.read(completion_chunk(begun))
    for index in order:
        sent += events.read(completion_chunk({"index": index, "function": {"arguments": pieces[index].pop(0)}}))
    sent += events.read({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}) + events.end()
    blocks = [(block["id"], block["name"], block["input"]) for block in decoded(events.message)["content"]]
    begun_in = [(f"call_{index}", calls[index][0], json.loads(calls[index][1])) for index in dict.fromkeys(order)]
    assert blocks == begun_in
    payloads = [json.loads(event.partition(b"data: ")[2]) for event in sent]
    at = [payload["index"] for payload in payloads if "index" in payload]
    assert at == sorted(at), "a block is over before the next begins"


def decoded(message: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json_bytes(message))


def completion_chunk(call: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]}


@given(TEXTS, TEXTS, NAMED, REASONS, st.integers(1, 5))
def test_a_cut_answer_is_the_same_in_ollamas_lines(
    reasoning: str, content: str, calls: list[tuple[str, str]], reason: str, size: int
) -> None:
    whole = completion(reasoning, content, calls, reason)
    expected = OllamaAnswer(OllamaChat(model="m")).whole(whole)
    answer, chunks = OllamaAnswer(OllamaChat(model="m")), ChatChunks()
    lines: list[dict[str, Any]] = []
    for chunk in chunks_of(whole, size):
        chunks.read(chunk)
        lines += [line] if (line := answer.delta(chunk)) is not None else []
    lines += answer.ends(chunks.whole())
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    messages = [line["message"] for line in lines]
    assert "".join(message["content"] for message in messages) == expected["message"]["content"] == content
    assert "".join(message.get("thinking", "") for message in messages) == reasoning
    called = [call for message in messages for call in message.get("tool_calls", ())]
    assert called == expected["message"].get("tool_calls", [])
    assert lines[-1]["done_reason"] == expected["done_reason"]


@given(CALLS)
def test_non_object_arguments_are_not_sent_as_objects(calls: list[tuple[str, str]]) -> None:
    """The answer arrives with the model's text and a note for each call."""
    broken = [(name, f"[{arguments}") for name, arguments in calls]
    for reason in ("tool_calls", "length"):
        message = decoded(whole_message(ASKED, completion("", "", broken, reason)))
        assert [block["input"] for block in message["content"]] == [{"raw_arguments": text} for _, text in broken]
        assert len(message.get("updraft", {}).get("notes", ())) == len(broken)


ROLES = st.sampled_from(["user", "assistant", "system", "tool"])
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "document", "thinking", "tool_use", "tool_result", "other"])},
    optional=dict.fromkeys(("text", "source", "thinking", "id", "name", "input", "content", "tool_use_id"), JSON),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES, "content": TEXTS | st.lists(BLOCKS, max_size=3) | JSON},
        optional=dict.fromkeys(("images", "tool_calls", "tool_name", "thinking"), JSON),
    ),
    max_size=3,
)


@given(MESSAGES, st.lists(st.dictionaries(st.sampled_from(["name", "type", "input_schema"]), JSON), max_size=2))
def test_odd_requests_are_refused_or_translated(messages: list[Any], tools: list[Any]) -> None:
    for translate in (
        lambda: chat_body(read_messages_request({"model": "m", "max_tokens": 1, "messages": messages, "tools": tools})),
        lambda: ollama_chat_body(read_ollama_request({"model": "m", "messages": messages, "tools": tools}, OllamaChat)),
    ):
        try:
            json.dumps(translate())
        except InvalidRequestError as error:
            assert error.param or error.code
