"""Requests that every server refuses, whatever model it serves."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.embedding_create_params import EmbeddingCreateParams
from updraft.cloud_engine.gateway.limits.request_size import size_of
from updraft.cloud_engine.gateway.relay.call import _peek
from updraft.protocol.decoding import MAX_ENTRIES, UNSUPPORTED, decode, read_object
from updraft.protocol.dialects.responses_request import ResponsesRequest
from updraft.protocol.embeddings import EmbeddingRequest
from updraft.protocol.errors import InvalidRequestError, RequestTooLargeError, UnsupportedFeatureError, WrongTypeError
from updraft.protocol.http.wire import WireRequest
from updraft.protocol.requests import MAX_MESSAGES, ChatRequest, CompletionRequest
from updraft.router.request.chat_request import read_routing_request
from wire_requests import parse_chat, parse_completion

ASKED = {"messages": [{"role": "user", "content": "a"}]}


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", **ASKED, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "a", **fields}).encode())


@pytest.mark.parametrize("param", ["n", "best_of"])
@pytest.mark.parametrize("count", [0, -1, 129, 2**31, 2**63 - 1])
@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_too_many_answers_are_refused_before_anything_is_sized_by_them(parse, count: int, param: str) -> None:
    fields = {"messages": [{"role": "user", "content": "a"}]} if parse is parse_chat else {"prompt": "a"}
    with pytest.raises(
        InvalidRequestError, match=f"{param} must be {'at least 1' if count < 1 else 'at most 128'}, got {count}"
    ) as caught:
        parse(json.dumps({"model": "m", param: count, **fields}).encode())
    assert caught.value.param == param


def test_null_is_the_default_of_a_switch() -> None:
    shared = dict.fromkeys(["stream", "ignore_eos", "use_beam_search"])
    assert chat(**shared, add_generation_prompt=None, continue_final_message=None) == chat()
    assert completion(**shared, echo=None) == completion()
    nothing = dict.fromkeys(["include_usage", "continuous_usage_stats", "include_obfuscation"])
    assert chat(stream=True, stream_options=nothing) == chat(stream=True, stream_options={})
    assert chat(updraft={"private": None}) == chat(updraft={})
    assert chat().add_generation_prompt is True


@pytest.mark.parametrize("parse", [chat, completion])
def test_beam_search_is_refused_by_name(parse: Any) -> None:
    with pytest.raises(UnsupportedFeatureError, match="use_beam_search is not supported") as caught:
        parse(use_beam_search=True, n=2)
    assert caught.value.param == "use_beam_search"


def test_an_empty_suffix_has_no_effect() -> None:
    assert completion(suffix="").suffix == ""
    with pytest.raises(UnsupportedFeatureError, match="suffix is not supported"):
        completion(suffix="b")


@pytest.mark.parametrize("bias", [{"9" * 5000: 1}, {"9" * 11: 1}, {"5": 1, "05": 1}, {"\u0665": 1}, {"": 1}, {"-1": 1}])
def test_keys_of_logit_bias_are_token_ids_each_once(bias: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match=r"^logit_bias") as caught:
        chat(logit_bias=bias)
    assert caught.value.param == "logit_bias"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("param", "value"),
    [("max_tokens", 10**30), ("priority", 10**30), ("stop_token_ids", [10**30]), ("stop_token_ids", [-(10**30)])],
)
@pytest.mark.parametrize("ask", [chat, completion])
def test_integers_out_of_all_bounds_are_refused_by_name(ask: Any, param: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{param} must") as caught:
        ask(**{param: value})
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")


@pytest.mark.parametrize("count", [-1, 21])
def test_completion_errors_name_its_own_field(count: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"^logprobs must be between 0 and 20") as caught:
        completion(logprobs=count)
    assert caught.value.param == "logprobs"


def test_an_integral_number_is_an_integer() -> None:
    fields = {"max_tokens": 8.0, "n": 1.0, "seed": 7.0, "top_k": 5.0, "stop_token_ids": [3.0]}
    assert chat(**fields) == chat(**{"max_tokens": 8, "n": 1, "seed": 7, "top_k": 5, "stop_token_ids": [3]})
    assert completion(prompt=[3.0, 4.0]).prompts == [[3, 4]]
    assert chat(updraft={"hold_tokens": 4}).updraft is not None
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        chat(max_tokens=8.5)


@pytest.mark.parametrize("field", ["audio", "functions", "function_call", "verbosity", "web_search_options", "store"])
def test_unsupported_openai_fields_are_refused_by_name_unless_null(field: str) -> None:
    assert chat(**{field: None}) == chat()
    with pytest.raises(UnsupportedFeatureError, match=f"^{field} ") as caught:
        chat(**{field: True if field == "store" else "high"})
    assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (chat_params.CompletionCreateParamsStreaming, ChatRequest),
        (text_params.CompletionCreateParamsStreaming, CompletionRequest),
        (EmbeddingCreateParams, EmbeddingRequest),
        ("openai.types.responses.input_token_count_params:InputTokenCountParams", ResponsesRequest),
    ],
)
def test_every_field_of_openais_is_known(theirs: Any, ours: Any) -> None:
    if isinstance(theirs, str):  # newer than the lowest version of openai that is supported
        module, _, name = theirs.partition(":")
        theirs = getattr(pytest.importorskip(module), name)
    assert theirs.__required_keys__ | theirs.__optional_keys__ <= UNSUPPORTED.union(ours.__struct_fields__)


def test_hints_about_the_cloud_are_taken() -> None:
    chat(service_tier="flex", prompt_cache_retention="24h", prompt_cache_options={"mode": "implicit"})
    chat(metadata={"a": "b"}, safety_identifier="me", prompt_cache_key="k", user="u", verbosity="medium")
    chat(metadata={"a": 1}, diagnostics={}, inference_geo="us")


def test_null_is_absent_within_objects_but_not_in_schemas() -> None:
    schema = {"enum": ["a", None], "default": None}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": None, "odd": None}}
    (parsed,) = chat(tools=[tool]).tools or ()
    assert parsed.function.parameters == schema
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": None, "odd": None}}
    constraint = chat(response_format=form).constraint()
    assert constraint is not None and json.loads(constraint.source) == schema


def test_values_that_other_servers_take_mean_the_same_here() -> None:
    assert chat(top_k=-1).sampling() == chat(top_k=0).sampling()
    assert chat(stop=[]).sampling() == chat().sampling()
    assert chat(top_p=0).sampling() == chat(top_k=1, top_p=1).sampling()


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": "Hi.", "tool_calls": [], "annotations": [{"type": "url_citation"}]}, "Hi."),
        ({"role": "assistant", "content": "Hi.", "audio": None, "function_call": None, "refusal": None}, "Hi."),
        ({"role": "assistant", "content": "{}", "parsed": {"a": 1}, "reasoning_content": "Hm."}, "{}"),
        ({"role": "assistant", "content": None, "reasoning_content": "Cut off"}, ""),
        ({"role": "assistant", "content": None, "reasoning": "Cut off"}, ""),
        ({"role": "assistant", "content": None, "refusal": "No."}, "No."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"role": "user", "content": [{"type": "text", "text": "Hi.", "cache_control": {"type": "x"}}]}, "Hi."),
    ],
)
def test_messages_as_others_wrote_them_are_read(message: dict[str, Any], text: str) -> None:
    (read,) = chat(messages=[message]).messages
    assert (read.text, read.tool_calls) == (text, None)


def test_calls_as_openais_helpers_dump_them_are_read() -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    call = {"id": "1", "type": "function", "index": 0, "function": function}
    result = {"role": "tool", "tool_call_id": "1", "content": "12"}
    (read, _) = chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}, result]).messages
    assert read.tool_calls is not None and read.tool_calls[0].function.name == "f"


@pytest.mark.parametrize("field", ["function_call", "audio"])
def test_untranslatable_message_fields_are_refused_by_name(field: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=field):
        chat(messages=[{"role": "assistant", "content": None, field: {"id": "x"}}])


def test_all_servers_take_as_many_messages_and_no_more() -> None:
    def readers(count: int) -> list[Callable[[], object]]:
        fields = {"model": "m", "messages": [{"role": "user", "content": "a"}] * count}
        body = json.dumps(fields).encode()
        wire = WireRequest("POST", "/v1/chat/completions", body=body)
        return [
            lambda: parse_chat(body),
            lambda: size_of(body, _peek(body)),
            lambda: read_routing_request(wire, fields, "auto", hold_tokens=None, started=0.0),
        ]

    for read in readers(MAX_MESSAGES):
        read()
    for read in readers(MAX_MESSAGES + 1):
        with pytest.raises(InvalidRequestError, match=f"the limit is {MAX_MESSAGES}") as caught:
            read()
        assert caught.value.param == "messages"


@pytest.mark.parametrize("name", ["n", "max_tokens", "max_completion_tokens"])
def test_all_servers_take_an_integer_with_a_point_and_no_fraction(name: str) -> None:
    def readers(value: float) -> list[Callable[[], object]]:
        fields = {"model": "m", "messages": [{"role": "user", "content": "a"}], name: value}
        body = json.dumps(fields).encode()
        wire = WireRequest("POST", "/v1/chat/completions", body=body)
        return [
            lambda: parse_chat(body),
            lambda: size_of(body, _peek(body)),
            lambda: read_routing_request(wire, fields, "auto", hold_tokens=None, started=0.0),
        ]

    for read in readers(2.0):
        read()
    for read in readers(2.5)[:2]:
        with pytest.raises(WrongTypeError) as caught:
            read()
        assert caught.value.param == name
    sizes = [size_of(body, _peek(body)) for body in (b'{"model":"m","n":2}', b'{"model":"m","n":2.0}')]
    assert sizes[0].answer == sizes[1].answer


@pytest.mark.parametrize("part", [b"{}", b"[]", b'{"a":[]}', b'["\\\\"]'])
def test_more_entries_than_anybody_sends_are_refused_unread(part: bytes) -> None:
    with pytest.raises(RequestTooLargeError, match=str(MAX_ENTRIES)):
        read_object(b'{"x": [' + b",".join([part] * MAX_ENTRIES) + b"]}")


def test_marks_in_texts_and_numbers_in_lists_are_no_entries() -> None:
    fields = {"text": '[{"a": ["\\"]}]' * MAX_ENTRIES, "tokens": list(range(2 * MAX_ENTRIES))}
    assert read_object(json.dumps(fields).encode()) == fields


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "m", "messages": [{"role": "user", "content": f"a{HALF}"}]}, "messages[0].content"),
        (
            {"messages": [{"content": "\U0001f600"}, {"content": [{"type": "text", "text": HALF}]}]},
            "messages[1].content[0].text",
        ),
        ({"model": HALF}, "model"),
        ({"metadata": {f"a{HALF}": 1}}, "metadata"),
        ({HALF: 1}, None),
    ],
)
def test_half_of_a_surrogate_pair_is_named(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate pair") as caught:
        read_object(json.dumps(fields).encode())
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")
    assert caught.value.message.startswith(param or "A field name")


@pytest.mark.parametrize("body", [b"{", b'{"a": "\xff"}', b'{"a": "\\ud83d", }', b'{"a": ' * 10_000])
def test_other_bodies_that_are_no_json_are_told_apart(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="not valid JSON") as caught:
        read_object(body)
    assert caught.value.code == "invalid_json"


class _Limits(msgspec.Struct):
    most: int = 0
    nested: dict[str, int] = {}


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"most": 1, "most": 1}', "most"),
        (b'{"most": 1, "m\\u006fst": 2}', "most"),
        (b'{"nested": {"a": 1, "b": 2, "a": null}}', "a"),
    ],
)
def test_repeated_names_in_settings_are_refused(body: bytes, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"'{name}' is given twice") as caught:
        decode(body, _Limits)
    assert (caught.value.param, caught.value.code) == (name, "invalid_value")
    assert decode(b'{"most": 1, "nested": {"most": 2, "a": 3}}', _Limits).nested["most"] == 2
