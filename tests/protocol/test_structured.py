"""Tools, formats and tool turns that are refused at parsing, with the param of each."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from updraft.protocol.errors import InvalidRequestError
from updraft.protocol.requests import ChatRequest, read_chat
from updraft.protocol.schemas.enforceable import enforceable
from wire_requests import parse_chat, parse_completion

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "text", "json_schema": SCHEMA["json_schema"]}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"guided_json": {}}, "guided_json"),
        ({"response_format": SCHEMA, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": 'start: "a"'}, "tools": [TOOL]}, "structured_outputs"),
        ({"grammar": 'root ::= "a"', "tools": [TOOL]}, "grammar"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{"type": "custom", "custom": {}}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "messages[0]"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_chat(chat(**fields))
    assert caught.value.param == param


def test_fields_of_tools_without_tools_are_taken() -> None:
    for choice in ("auto", "none", None):
        for tools in ([], None):
            request = parse_chat(chat(tools=tools, tool_choice=choice, parallel_tool_calls=False))
            assert request.tool_use is None and request.tools is None


def test_names_of_functions_may_have_128_characters() -> None:
    named = [{"type": "function", "function": {"name": "f" * 128}}]
    assert parse_chat(chat(tools=named)).tool_use is not None
    with pytest.raises(InvalidRequestError, match="1 to 128 letters"):
        parse_chat(chat(tools=[{"type": "function", "function": {"name": "f" * 129}}]))


def test_taken() -> None:
    turns = [
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12"}]},
    ]
    request = parse_chat(chat(messages=turns, tools=[TOOL], tool_choice="auto", parallel_tool_calls=False))
    assert [message.text for message in request.messages] == ["", "12"]
    assert parse_chat(chat(tool_choice="none", response_format={"type": "text"})).constraint() is None
    wanted = parse_chat(chat(tools=[TOOL], tool_choice="none", response_format=SCHEMA)).constraint()
    assert wanted is not None and wanted.source == '{"type":"object"}'
    completion = parse_completion(
        json.dumps({"model": "m", "prompt": "x", "structured_outputs": {"regex": "a"}}).encode()
    )
    assert completion.constraint() is not None


PYDANTIC = {
    "type": "object",
    "properties": {
        "not": {"type": "string"},
        "path": {"type": "string", "format": "path"},
        "day": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "price": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
        "counts": {
            "type": "object",
            "propertyNames": {"not": {"const": "a"}},
            "additionalProperties": {"type": "integer"},
        },
        "other": {"not": {"type": "string"}, "default": {"not": "a schema"}},
        "few": {"type": "array", "uniqueItems": False},
    },
}


def test_pydantic_schemas_are_enforced_or_noted() -> None:
    notes: set[str] = set()
    kept = enforceable(PYDANTIC, notes, strict=False)["properties"]
    assert kept["not"] == {"type": "string"}, "a property may have any name"
    assert kept["path"] == {"type": "string"}
    assert kept["day"] == {"type": "string", "format": "date"}
    assert kept["tags"] == {"type": "array", "items": {"type": "string"}}
    assert kept["counts"] == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert kept["other"] == {"default": {"not": "a schema"}}
    assert kept["few"] == {"type": "array"}
    decimal = re.compile(kept["price"]["anyOf"][1]["pattern"])
    assert all(decimal.search(text) for text in ("1", "-1.50", "+.5", "00.", "7."))
    assert not any(decimal.search(text) for text in ("", "-", ".", "+.", "1a", "1..2"))
    assert [note.split()[0] for note in sorted(notes)] == ["format", "not", "propertyNames", "uniqueItems"]


def test_strict_schema_keeps_unenforceable_keywords() -> None:
    notes: set[str] = set()
    kept = enforceable(PYDANTIC, notes, strict=True)["properties"]
    assert kept["tags"]["uniqueItems"] is True
    assert "propertyNames" in kept["counts"]
    assert "(?!" not in kept["price"]["anyOf"][1]["pattern"], "a Decimal is held to without looking ahead"
    assert [note.split()[0] for note in notes] == ["format"]


def held_to(schema: dict[str, Any], *, strict: bool = True) -> dict[str, Any]:
    notes: set[str] = set()
    kept = enforceable(schema, notes, strict=strict)
    assert not notes
    return kept


def test_sets_of_few_values_are_written_out() -> None:
    color = {"enum": ["red", "green"]}
    schema = {"$defs": {"Color": color}, "type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/Color"}}
    lists = [[item["const"] for item in each.get("prefixItems", [])] for each in held_to(schema)["anyOf"]]
    assert lists == [[], ["red"], ["green"], ["red", "green"], ["green", "red"]]
    few = held_to({"type": "array", "uniqueItems": True, "items": {"enum": list(range(9))}, "maxItems": 2})
    assert len(few["anyOf"]) == 1 + 9 + 72
    assert held_to({"type": "array", "uniqueItems": True, "maxItems": 1}) == {"type": "array", "maxItems": 1}
    for many in ({"enum": list(range(9))}, {"type": "string"}):
        kept = held_to({"type": "array", "uniqueItems": True, "items": many})
        assert kept["uniqueItems"] is True, "the grammar refuses it by name"


def test_keys_of_a_kind_are_names_or_patterns() -> None:
    value = {"type": "integer"}
    named = held_to({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": value})
    assert named == {"type": "object", "properties": {"a": value, "b": value}, "additionalProperties": False}
    for names, good, bad in (
        ({"pattern": "^[a-z]+$"}, "ab", "A"),
        ({"minLength": 2, "maxLength": 3}, "ab", "a"),
        ({"format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000", "x"),
        ({"format": "date"}, "2024-02-28", "2024-02-30"),
    ):
        (pattern,) = held_to({"propertyNames": names, "additionalProperties": value})["patternProperties"]
        assert re.search(pattern, good) and not re.search(pattern, bad)
    with_others = {"propertyNames": {"enum": ["a"]}, "properties": {"a": value}}
    assert held_to(with_others) == with_others


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (
            r"(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)",
            ["1", "-123.45", "0.5", ".05"],
            ["", ".", "1234", "1.234"],
        ),
        (
            r"(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d*\.\d*0*$)",
            ["123", "1.23", ".123", "12.3"],
            ["1234", "1.234", "-", "123.4"],
        ),
        (r"\d*\.?\d{0,2}0*$", ["12345.67", ".5", "7."], ["1.234", "."]),
        (r"\d*\.?\d{0,0}0*$", ["12345"], ["1.2", ".", ""]),
    ],
    ids=["digits and places", "digits", "places", "no places"],
)
def test_decimals_of_older_pydantic_are_held_to_their_digits(pattern: str, good: list[str], bad: list[str]) -> None:
    kept = re.compile(held_to({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*" + pattern})["pattern"])
    assert all(kept.search(text) for text in good)
    assert not any(kept.search(text) for text in bad)


def test_versions_of_uuids_are_held_to() -> None:
    (pattern,) = (each["pattern"] for each in [held_to({"type": "string", "format": "uuid4"})])
    assert re.search(pattern, "123e4567-e89b-42d3-a456-426614174000")
    assert not re.search(pattern, "123e4567-e89b-12d3-a456-426614174000")


def test_allowed_tools_are_the_tools_that_are_left() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]

    def read(mode: str, *names: str) -> ChatRequest:
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}} for name in names]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        messages = [{"role": "user", "content": "x"}]
        return read_chat({"model": "m", "messages": messages, "tools": tools, "tool_choice": choice})

    request = read("required", "c", "a")
    assert request.tools is not None and [tool.function.name for tool in request.tools] == ["a", "c"]
    assert request.tool_choice == "required"
    for mode, names in (("auto", ("a", "d")), ("auto", ()), ("never", ("a",))):
        with pytest.raises(InvalidRequestError, match="allowed_tools"):
            read(mode, *names)


def test_a_schema_at_the_top_is_one_for_the_answer() -> None:
    fields = {"model": "m", "messages": [{"role": "user", "content": "x"}], "json_schema": {"const": None}}
    constraint = read_chat(fields).constraint()
    assert constraint is not None and (constraint.kind, constraint.source) == ("json_schema", '{"const":null}')
    with pytest.raises(InvalidRequestError, match="exclude"):
        read_chat({**fields, "structured_outputs": {"regex": "a"}})
