"""Responses requests as chat requests: every field is translated, has no effect to have, or is refused by name."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from updraft.protocol.dialects.responses_events import begun_response
from updraft.protocol.dialects.responses_items import items_of, with_own_ids
from updraft.protocol.dialects.responses_request import chat_body, read_responses_request
from updraft.protocol.errors import InvalidRequestError

REFUSED = {
    "access_programs": {"cyber": "standard"},
    "image": {"context_compression": "auto"},
    "moderation": {"model": "omni"},
    "prompt": {"id": "pmpt_1"},
}
TAKEN = {
    "context_management": [{"type": "compaction"}],
    "background": False,
    "conversation": "conv_1",
    "background_options": {"completion_window": "2h"},
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    "input": "hello",
    "instructions": "Be brief.",
    "max_output_tokens": 20,
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "model": "auto",
    "parallel_tool_calls": True,
    "previous_response_id": "resp_1",
    "prompt_cache_key": "key",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low", "summary": "auto", "context": "auto", "mode": "standard"},
    "safety_identifier": "someone",
    "service_tier": "flex",
    "store": True,
    "stream": True,
    "stream_options": {"include_obfuscation": True},
    "temperature": 0.5,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "tools": [
        {"type": "function", "name": "f", "parameters": None, "strict": True, "allowed_callers": ["direct"]},
        {"type": "function", "name": "g", "defer_loading": False},
    ],
    "truncation": "auto",
    "top_logprobs": 2,
    "top_p": 0.9,
    "user": "u",
}

NAMES = st.sampled_from(["type", "text", "name", "tools", "effort", "format", "content", "role"])


def chat_of(**fields: Any) -> dict[str, Any]:
    request = read_responses_request({"model": "auto", **fields})
    return chat_body(request, items_of(request.input or []))


def test_every_field_of_openais_is_known() -> None:
    fields = ResponseCreateParamsStreaming
    assert set(REFUSED) | set(TAKEN) >= fields.__required_keys__ | fields.__optional_keys__


@pytest.mark.parametrize("name", REFUSED)
def test_fields_without_a_chat_equivalent_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name.partition("_")[0]) as caught:
        chat_of(input="hello", **{name: REFUSED[name]})
    assert (caught.value.param or "").startswith(name)


def test_supported_fields_become_chat_fields() -> None:
    assert chat_of(**TAKEN) == {
        "model": "auto",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
        "max_completion_tokens": 20,
        "temperature": 0.5,
        "top_p": 0.9,
        "logprobs": True,
        "top_logprobs": 2,
        "reasoning_effort": "low",
        "verbosity": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "tools": [
            {"type": "function", "function": {"name": "f", "strict": True}},
            {"type": "function", "function": {"name": "g"}},
        ],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
        },
        "parallel_tool_calls": True,
        "prompt_cache_key": "key",
        "prompt_cache_options": {"mode": "implicit"},
        "prompt_cache_retention": "24h",
        "safety_identifier": "someone",
        "service_tier": "flex",
        "user": "u",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_items_are_messages() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"}
    file = {"type": "input_file", "file_data": "data:application/pdf;base64,AA", "filename": "a.pdf"}
    chat = chat_of(
        input=[
            {"role": "developer", "content": "Rules."},
            {"role": "user", "content": [{"type": "input_text", "text": "See:"}, image, file]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "opaque"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One moment."}]},
            {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "7"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ]
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert chat["messages"] == [
        {"role": "developer", "content": "Rules."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "See:"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
                {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA", "filename": "a.pdf"}},
            ],
        },
        {"role": "assistant", "content": "One moment.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "7"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "input_image"}]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 1}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"tools": [{"type": "function", "name": "f", "runs_on": "moon"}]}, "tools[0].runs_on"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"include": ["everything"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream_options": {}}, "stream_options"),
        ({"seed": 1}, "seed"),
    ],
)
def test_bad_requests_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat_of(**{"input": "hello", **fields})
    assert caught.value.param == param


def test_an_item_of_an_unknown_type_is_left_out_unless_it_has_text() -> None:
    said = {"role": "user", "content": "hello"}
    unknown = [{"type": kind, "id": "x", "tools": []} for kind in ("tool_search_output", "program", "additional_tools")]
    assert chat_of(input=[*unknown, said]) == chat_of(input=[said])
    notes = read_responses_request({"model": "auto", "input": [*unknown, said]}).hints
    assert notes[1] == "input[1]: left out, program items belong to a vendor's tool" and len(notes) == 3
    parts = [{"type": "input_text", "text": "hello"}]
    assert chat_of(input=[{"type": "agent_message", "content": parts}]) == chat_of(input=[said])


@pytest.mark.parametrize(
    "metadata",
    [{"a": 1}, {"a": None}, {"k": "v" * 513}, {"k" * 65: "v"}, {str(at): "v" for at in range(17)}, "text", ["a"]],
)
def test_metadata_is_a_hint(metadata: Any) -> None:
    asked = read_responses_request({"model": "auto", "input": "hello", "metadata": metadata})
    (note,) = asked.hints
    assert note.startswith("metadata: kept in part, metadata holds at most 16 texts of up to 512 characters")
    kept = begun_response(asked, stored=False)["metadata"]
    assert kept == ({str(at): "v" for at in range(16)} if len(metadata) == 17 else {})


def test_other_servers_options_of_reasoning_are_hints() -> None:
    reasoning = {"effort": "low", "max_tokens": 100, "exclude": True, "enabled": True, "mode": "standard"}
    asked = read_responses_request({"model": "auto", "input": "hello", "reasoning": reasoning})
    assert asked.hints == tuple(f"reasoning.{name}: no effect" for name in ("max_tokens", "exclude", "enabled"))
    assert chat_of(input="hello", reasoning=reasoning) == chat_of(input="hello", reasoning={"effort": "low"})


def test_hints_have_notes_and_no_effect() -> None:
    function = {"type": "function", "name": "f", "parameters": {}}
    vendor: list[dict[str, Any]] = [
        {"type": "web_search_call", "id": "w", "status": "completed"},
        {"type": "local_shell_call_output", "id": "c", "output": "x"},
        {"type": "mcp_list_tools", "id": "m", "tools": []},
        {"type": "compaction", "encrypted_content": "x"},
    ]
    said = {"role": "user", "content": "hello"}
    fields: dict[str, Any] = {
        "input": [*vendor, said],
        "tools": [
            {"type": "web_search"},
            {**function, "defer_loading": True},
            {"type": "namespace", "tools": [function]},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, function]},
        "client_metadata": {"installation": "1"},
        "context_management": [{"type": "compaction"}],
        "reasoning": {"effort": "low", "summary": "detailed"},
    }
    request = read_responses_request({"model": "auto", **fields})
    notes = request.hints
    assert [note.partition(":")[0] for note in notes] == [
        "client_metadata", "context_management", "reasoning.summary", "tools[0]", "tools[1].defer_loading", "tools[2]",
        "input[0]", "input[1]", "input[2]", "input[3]",
    ]  # fmt: skip
    plain: dict[str, Any] = {"input": [said], "tools": [function], "reasoning": {"effort": "low"}}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    assert chat_of(**fields) == chat_of(**plain, tool_choice=choice)
    assert read_responses_request({"model": "auto", **plain}).hints == ()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "x", "user", "assistant", "auto"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)
ITEMS = st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(("role", "content", "call_id", "output"), VALUES) | {
    "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", []]),
}), max_size=3)  # fmt: skip


@given(st.fixed_dictionaries({}, optional={name: VALUES for name in TAKEN if name != "model"} | {"input": ITEMS}))
def test_whatever_comes_is_translated_or_refused(fields: dict[str, Any]) -> None:
    with suppress(InvalidRequestError):
        chat_of(**fields)


def test_an_item_that_comes_twice_has_two_ids() -> None:
    item = {"type": "message", "role": "user", "id": "msg_1", "content": "x"}
    first, second = with_own_ids(items_of([item, item]))
    assert first["id"] == "msg_1" != second["id"]
    assert {**first, "id": ""} == {**second, "id": ""}
