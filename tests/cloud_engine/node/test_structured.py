"""Structured output and tools over a real node, with the genuine openai client."""

from __future__ import annotations

import json
import pathlib
import re
import time
import typing
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
import torch
from tiny_model import write_model

torch.set_num_threads(1)
TEMPLATE = """{% if tools %}<|im_start|>system
{% for t in tools %}{{ t | tojson }}
{% endfor %}Call with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
UNKNOWN_TYPE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "elephant"}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather now", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, spawned: Any) -> Iterator[str]:
    """A random Llama over one token per byte, whose template knows tools; its vocabulary is padded."""
    folder = write_model(tmp_path_factory.mktemp("models") / "tiny", 0, context=2048, padding=29)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    node = ("-m", "updraft", "node", "--port", "0", "--model", str(folder), "--threads", "1", "--exit-with-parent")
    with spawned(*node) as process:
        yield process.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def ask(client: openai.OpenAI, **options: Any) -> Any:
    request = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200, "seed": 5}
    return client.chat.completions.create(**{**request, **options})


class Light(pydantic.BaseModel):
    colour: Literal["red", "green"]
    seconds: list[Literal[1, 2, 3]] = pydantic.Field(max_length=3)
    on: bool


def test_parse_into_a_class(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Which light?"}]
    answer = client.chat.completions.parse(model="tiny", messages=messages, response_format=Light, max_tokens=400)
    assert isinstance(answer.choices[0].message.parsed, Light)
    assert answer.choices[0].finish_reason == "stop"


def test_json_object_regex_choice_and_grammar(client: openai.OpenAI) -> None:
    whole = ask(client, response_format={"type": "json_object"}, max_tokens=1500, temperature=0.7)
    if whole.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(whole.choices[0].message.content), dict)
    assert whole.choices[0].message.content.startswith("{")
    for constraint, pattern in (
        ({"regex": "[a-f]{4}[0-9]"}, "[a-f]{4}[0-9]"),
        ({"choice": ["yes, sir", "no"]}, "yes, sir|no"),
        ({"grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
        ({"json": CITY}, r'\{\s*"city"\s*:\s*"(Bern|Rome)"\s*\}'),
    ):
        answer = ask(client, extra_body={"structured_outputs": constraint}, n=3).choices
        assert all(re.fullmatch(pattern, one.message.content) for one in answer), answer
    text = client.completions.create(model="tiny", prompt="x", extra_body={"structured_outputs": {"regex": "ab+c"}})
    assert re.match("ab+", text.choices[0].text)


def test_a_stream_keeps_to_the_schema(client: openai.OpenAI) -> None:
    fmt = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    chunks = list(ask(client, response_format=fmt, stream=True, logprobs=True))
    assert json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks))["city"] in ("Bern", "Rome")


@pytest.mark.parametrize("named", [False, True])
def test_a_forced_call(client: openai.OpenAI, named: bool) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}} if named else "required"
    answers = ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, n=4).choices
    for answer in answers:
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        [call] = answer.message.tool_calls
        assert call.id.startswith("call_") and call.type == "function"
        if call.function.name == "get_weather":
            assert json.loads(call.function.arguments)["city"] in ("Bern", "Rome")
        else:
            assert not named and json.loads(call.function.arguments) == {}
    assert len({answer.message.tool_calls[0].id for answer in answers}) == 4


def test_streamed_calls_equal_whole_ones_and_go_back(client: openai.OpenAI) -> None:
    options = {"tools": TOOLS, "tool_choice": "required", "temperature": 0.9, "max_tokens": 700}
    message = ask(client, **options).choices[0].message
    chunks = list(ask(client, **options, stream=True))
    calls: list[dict[str, str]] = []
    for chunk in chunks:
        assert chunk.choices[0].delta.content in (None, "")
        for delta in chunk.choices[0].delta.tool_calls or ():
            if delta.id:
                assert (delta.index, delta.type) == (len(calls), "function")
                calls.append({"name": delta.function.name, "arguments": ""})
            calls[delta.index]["arguments"] += delta.function.arguments or ""
    assert chunks[-1].choices[0].finish_reason in ("tool_calls", "length")
    assert calls == [{"name": call.function.name, "arguments": call.function.arguments} for call in message.tool_calls]
    with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], seed=5, **options
    ) as events:
        final = events.get_final_completion()
    assert len(final.choices[0].message.tool_calls or []) == len(calls)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12 °C"} for call in message.tool_calls]
    again = ask(client, messages=[{"role": "user", "content": "Hello"}, message, *results], tools=TOOLS, max_tokens=8)
    assert again.usage.prompt_tokens > 300


def test_strict_tools_hold_a_free_answer_to_their_schema(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    answer = ask(client, tools=tools, max_tokens=20)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_a_model_that_writes_a_call_of_its_own_accord(spawn_fake_node: Any) -> None:
    """The scripted engine says what it was told: text, two calls, one of them no JSON."""
    text = (
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {oops}}\n</tool_call>'
    )
    node = spawn_fake_node("--tool-call-parser", "hermes")
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        question: Any = {"model": "echo", "messages": [{"role": "user", "content": text}], "tools": TOOLS}
        choice = client.chat.completions.create(**question).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert [call.function.arguments for call in choice.message.tool_calls or []] == ['{"city": "Bern"}', "{oops}"]
        once: Any = {**question, "parallel_tool_calls": False}
        choice = client.chat.completions.create(**once).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert [call.function.arguments for call in choice.message.tool_calls or []] == ['{"city": "Bern"}']
        *chunks, counted = client.chat.completions.create(**once, stream=True, stream_options={"include_usage": True})
        deltas = [chunk.choices[0].delta for chunk in chunks]
        calls = [call.function for delta in deltas for call in delta.tool_calls or []]
        assert [call.name for call in calls if call.name] == ["get_weather"]
        assert "".join(call.arguments or "" for call in calls) == '{"city": "Bern"}'
        assert "".join(delta.content or "" for delta in deltas) == "Let me see."
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert counted.usage.completion_tokens == len(text.partition("\n</tool_call>")[0]), "the engine was stopped"
        plain = client.chat.completions.create(**{**question, "tool_choice": "none"}).choices[0]
        assert (plain.message.content, plain.message.tool_calls) == (text, None)


def test_a_node_without_a_format_says_so(fake_node: Any) -> None:
    with openai.OpenAI(base_url=f"{fake_node.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as caught:
            ask(client, model="echo", tools=TOOLS)
        assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": UNKNOWN_TYPE}, "response_format", "elephant"),
        ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "structured_outputs", "regex"),
        (
            {"extra_body": {"structured_outputs": {"json": {"multipleOf": 1234567, "type": "integer"}}}},
            "structured_outputs",
            "simplify",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "not",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unusable_constraints(
    client: openai.OpenAI, fields: dict[str, Any], param: str, says: str, stream: bool
) -> None:
    started = time.perf_counter()
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        ask(client, **fields, stream=stream)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert time.perf_counter() - started < 60
    assert ask(client, max_tokens=1).choices[0].finish_reason == "length"


def test_a_constraint_that_fails_on_the_way_fails_its_request_alone(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.APIError, match="too complex"):
        list(ask(client, extra_body={"structured_outputs": {"regex": "[a-c]{9}(?:a?){5000}a{5000}"}}, stream=True))
    assert httpx.get(f"{url}/health").json()["status"] == "ok"
    assert ask(client, max_tokens=1).choices


class Stay(pydantic.BaseModel):
    folder: pathlib.Path
    nights: typing.Annotated[int, pydantic.Field(ge=1, le=9)]
    guests: set[Literal["Ann", "Bo"]]
    names: set[str]


def schema_of(kind: type[pydantic.BaseModel], *, strict: bool) -> Any:
    schema = {**kind.model_json_schema(), "additionalProperties": False}
    schema["properties"]["names"] |= {"maxItems": 2, "items": {"type": "string", "maxLength": 4}}
    schema["properties"]["folder"]["maxLength"] = 8
    return {"type": "json_schema", "json_schema": {"name": "stay", "schema": schema, "strict": strict}}


def test_unsupported_keywords_are_noted_and_the_others_enforced(client: openai.OpenAI) -> None:
    form = schema_of(Stay, strict=False)
    whole = ask(client, response_format=form)
    assert {note.split()[0] for note in whole.model_extra["updraft"]["notes"]} == {"format", "uniqueItems"}
    stay = json.loads(whole.choices[0].message.content)
    assert Stay.model_validate(stay) and len(set(stay["guests"])) == len(stay["guests"]), "a set of few is held to"
    *_, last = ask(client, response_format=form, stream=True)
    assert last.choices[0].finish_reason == "stop"
    assert last.model_extra["updraft"] == whole.model_extra["updraft"]
    assert "updraft" not in ask(client).model_extra
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        ask(client, response_format=schema_of(Stay, strict=True))


def test_a_forced_tool_takes_what_pydantic_writes(client: openai.OpenAI) -> None:
    parameters = schema_of(Stay, strict=False)["json_schema"]["schema"]
    tool = {"type": "function", "function": {"name": "stay", "parameters": parameters}}
    answer = ask(client, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert Stay.model_validate_json(answer.choices[0].message.tool_calls[0].function.arguments)
    assert answer.model_extra["updraft"]["notes"]


def test_the_last_text_and_the_finish_come_apart(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, max_tokens=3))
    assert [bool(chunk.choices[0].delta.content) for chunk in chunks if chunk.choices[0].finish_reason] == [False]
    texts = list(client.completions.create(model="tiny", prompt="Hello", max_tokens=3, seed=5, stream=True))
    assert [piece.choices[0].text for piece in texts if piece.choices[0].finish_reason] == [""]
