"""Faults that anybody can see in a finished answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.protocol.requests import ChatRequest
from updraft.router.gates.answer_faults import fault_of
from updraft.router.tiers.interfaces import LocalAnswer
from updraft.text.tool_calls import ToolSyntax
from updraft.text.tool_formats import ToolFormat
from updraft.text.tool_stream import OfferedTools

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
JSON = {"type": "json_object"}
HERMES = ToolFormat("hermes", ToolSyntax("<tool_call>", "</tool_call>"), {})


def answer(text: str, finish_reason: Any = "stop", stop_reason: str | None = None) -> LocalAnswer:
    return LocalAnswer(text=text, finish_reason=finish_reason, stop_reason=stop_reason)


def chat(**fields: Any) -> ChatRequest:
    return msgspec.convert({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}, ChatRequest)


def fault(text: str, **fields: Any) -> str | None:
    request = chat(**fields)
    tools = None if request.tool_use is None else OfferedTools(HERMES, request.tool_use)
    return fault_of(answer(text), request, tools)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        "Paris.",
        "Sorry is what people say.",
        "The word cannot has six letters.",
        '```json\n{"a": [1, 2]}\n```',
        "```python\nprint(\n```",
        "I cancelled it.",
    ],
)
def test_usual_answers_have_none(text: str) -> None:
    assert fault(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "an empty answer"),
        (" \n", "an empty answer"),
        ("I'm sorry, but I can't help with that.", "refused"),
        ("I cannot answer this.", "refused"),
        ("As an AI, I have no opinion.", "refused"),
        ('Here it is:\n```json\n{"a": [1, 2}\n```', "a JSON block that cannot be parsed"),
        ('```json\n{"a": 1', "a JSON block that cannot be parsed"),
    ],
)
def test_visible_faults(text: str, expected: str) -> None:
    found = fault(text)
    assert found is not None
    assert expected in found


@pytest.mark.parametrize(
    ("stop_reason", "expected"),
    [("repetition_detected", "repeated itself"), ("context_length", "cut off"), (None, None)],
)
def test_an_answer_that_ends_before_its_limit(stop_reason: str | None, expected: str | None) -> None:
    """The request's own `max_tokens` is no fault: the cloud's answer would end there, too."""
    found = fault_of(answer("one two", "length", stop_reason), chat(), None)
    assert (found is None) if expected is None else (found is not None and expected in found)


def test_json_that_was_asked_for() -> None:
    assert fault('{"a": 1}', response_format=JSON) is None
    assert fault('{"a": 1', response_format=JSON) == "the device's answer is not the JSON that was asked for"
    assert fault("[" * 100_000, response_format=JSON) == "the device's answer is not the JSON that was asked for"


def test_tool_calls() -> None:
    assert fault(call("weather", '{"city": "Rome"}'), tools=[WEATHER]) is None
    assert fault("It rains.", tools=[WEATHER]) is None
    assert fault(call("weather", "{}"), tools=[WEATHER]) == "the device called weather without city"
    assert fault("It rains.", tools=[WEATHER], tool_choice="required") == "the device called no tool"


@given(st.text(max_size=200), st.dictionaries(st.text(max_size=5), st.integers(), max_size=3))
def test_any_text_is_checked(text: str, value: dict[str, int]) -> None:
    fault(text, tools=[WEATHER])
    assert fault(json.dumps(value), response_format=JSON) is None
