"""Tool calls in tags and in Gemma's notation, split anywhere, and text that only looks like a call."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.protocol.requests import Message
from updraft.protocol.structured import CalledFunction, Function, FunctionName, NamedTool, Tool, ToolCall, ToolUse
from updraft.text.chat import ChatTemplate
from updraft.text.grammars.compiler import GrammarCompiler, Vocabulary
from updraft.text.tokenizer import Tokenizer
from updraft.text.tool_formats import ToolFormat
from updraft.text.tool_stream import AnswerParser, OfferedTools

TEMPLATES = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat-templates" / "ollama-jinja"
POCKET = Path(__file__).resolve().parents[2] / "embedded" / "weights" / "pocket-large"
PROPERTIES = {
    "a": {"type": "string"},
    "n": {"type": "integer"},
    "o": {"type": "object"},
    "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "e": {"enum": ["1", "2"]},
    "u": {},
}
SCHEMAS = {"f": {"type": "object", "properties": PROPERTIES}, "g": {}}
QWEN = (
    'Well.\n\n<tool_call>\n<function=f>\n<parameter=a>\n 1 </tool_call> "x"\n\nüö\n</parameter>\n<parameter=n>\n3\n'
    "</parameter>\n<parameter=m>\nnull\n</parameter>\n<parameter=e>\n1\n</parameter>\n<parameter=u>\nTrue\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"
)
QWEN_CALLS: list[Any] = [("f", {"a": ' 1 </tool_call> "x"\n\nüö', "n": 3, "m": None, "e": "1", "u": True}), ("g", {})]
GLM = (
    "<tool_call>f<arg_key>a</arg_key><arg_value>12</arg_value>\n<arg_key>n</arg_key>\n<arg_value>12</arg_value><arg_key>o"
    '</arg_key><arg_value>{"k": [NaN]}</arg_value></tool_call><tool_call>g\n</tool_call> bye'
)
GEMMA = (
    'x<|tool_call>call:f{a:<|"|>1, {y}: "z" <tool_call|>\n<|"|>,n:-1.5e3,o:{k:[true,null,<|"|>v<|"|>,{}],7:1},"u":word}'
    "<tool_call|><|tool_call>call:g{}<tool_call|>"
)
GEMMA_ARGUMENTS = {
    "a": '1, {y}: "z" <tool_call|>\n',
    "n": -1500.0,
    "o": {"k": [True, None, "v", {}], "7": 1},
    "u": "word",
}
CASES: list[tuple[str, str, str, list[Any]]] = [
    ("qwen3_coder", QWEN, "Well.", QWEN_CALLS),
    ("qwen3_coder", QWEN.removesuffix("\n</tool_call>"), "Well.", QWEN_CALLS),
    ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", {"a": 1})]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>x</function></tool_call>.", ".", [("f", {"a": "x"})]),
    ("glm45", GLM, " bye", [("f", {"a": "12", "n": 12, "o": '{"k": [NaN]}'}), ("g", {})]),
    ("gemma4", GEMMA, "x", [("f", GEMMA_ARGUMENTS), ("g", {})]),
    ("gemma4", GEMMA.removesuffix("<tool_call|>"), "x", [("f", GEMMA_ARGUMENTS), ("g", {})]),
]
TEXTS = [
    ("qwen3_coder", "a <tool_call> no"),
    ("qwen3_coder", "<tool_call>\n<function=h>\n</function>\n</tool_call> and"),
    ("qwen3_coder", QWEN[7:90]),
    ("qwen3_coder", "<tool_call><function=f>what?</tool_call>"),
    ("glm45", "x <tool_call>no way</tool_call>"),
    ("glm45", GLM[:50]),
    ("gemma4", "<|tool_call>call:h{a:1}<tool_call|>"),
    ("gemma4", "<|tool_call>call:f{a:1:2}<tool_call|> and"),
    ("gemma4", '<|tool_call>call:f{a:<|"|>'),
]


class NoTokens:
    chat_template = None

    def special_id(self, text: str) -> int | None:
        return None


def read(name: str, chunks: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolFormat.named(name, NoTokens()).parser(SCHEMAS)
    content, calls = "", []
    for parsed in [*map(parser.push, chunks), parser.flush()]:
        content += parsed.content
        for delta in parsed.calls:
            if delta.name:
                calls.append((delta.name, ""))
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    return content, calls


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
@given(data=st.data())
def test_calls_parse_at_any_split(name: str, text: str, content: str, calls: list[Any], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    chunks = [text[first:last] for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, parsed = read(name, chunks)
    assert shown == content
    assert [(called, json.loads(written)) for called, written in parsed] == calls


@pytest.mark.parametrize(("name", "text"), TEXTS)
@given(data=st.data())
def test_text_that_is_no_call_stays_text(name: str, text: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    assert read(name, [text[:cut], text[cut:]]) == (text, [])
    assert read(name, list(text)) == (text, [])


def test_foreign_call_is_shown_as_it_comes() -> None:
    for name, text in (
        ("glm45", "<tool_call>no way"),
        ("glm45", "<tool_call>(f)"),
        ("qwen3_coder", "<tool_call><function=>"),
    ):
        assert ToolFormat.named(name, NoTokens()).parser(SCHEMAS).push(text).content == text


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("gemma4_31b_chat_template.jinja2", "gemma4"),
        ("laguna_v2_chat_template.jinja2", "glm45"),
        ("laguna_v8_chat_template.jinja2", "glm45"),
        ("nemotron3nano_chat_template.jinja2", "qwen3_coder"),
        ("nemotron35_chat_template.jinja2", "qwen3_coder"),
        ("qwen38_chat_template.jinja", "qwen3_coder"),
        ("glimmer_chat_template.jinja", None),
    ],
)
def test_calls_written_by_a_models_template_are_read(file: str, name: str | None) -> None:
    if not (path := TEMPLATES / file).exists():
        pytest.skip("no chat templates of other projects here")
    template = ChatTemplate(path.read_text(encoding="utf-8"))

    class Model(NoTokens):
        chat_template = template

    detected = ToolFormat.detected(Model())
    assert (detected and detected.name) == name
    if detected is None:
        return
    arguments = {"a": 'Köln\n"x" {', "n": 7, "o": {"k": [True, "v"]}}
    calls = [
        ToolCall("c1", CalledFunction(called, json.dumps(given))) for called, given in (("f", arguments), ("g", {}))
    ]
    tools = [Tool("function", Function(called, "Does.", SCHEMAS[called])) for called in SCHEMAS]
    turns = [
        Message("user", "Do."),
        Message("assistant", tool_calls=calls),
        Message("tool", "Done.", tool_call_id="c1"),
    ]
    prompt = template.render(turns, tools=tools)
    template.close()
    written = prompt[prompt.rindex(detected.syntax.opener, 0, prompt.index("Köln")) :]
    offered = OfferedTools(detected, ToolUse(tools))
    message, reason = AnswerParser(offered).whole(written.partition("Done.")[0], "stop")
    assert reason == "tool_calls"
    assert [call.function.name for call in message.tool_calls or ()] == ["f", "g"]
    assert [json.loads(call.function.arguments) for call in message.tool_calls or ()] == [arguments, {}]


@pytest.mark.parametrize(
    ("name", "call"), [("qwen3_coder", QWEN[7:]), ("glm45", GLM[: -len(" bye")]), ("gemma4", GEMMA[1:])]
)
def test_required_call_names_a_declared_function(name: str, call: str) -> None:
    tokenizer = Tokenizer.from_folder(POCKET)
    schemas = {"f": {**SCHEMAS["f"], "additionalProperties": True}, "g": None}
    tools = [Tool("function", Function(called, parameters=schema)) for called, schema in schemas.items()]
    constraint = ToolFormat.named(name, NoTokens()).constraint(ToolUse(tools, "required"))
    assert constraint is not None
    assert constraint.notes == ("tools: the model's format for calls leaves arguments unchecked",)
    compiler = GrammarCompiler(lambda: Vocabulary.of(tokenizer, tokenizer.eos_ids), tokenizer.encode)
    for text, fits in ((call.replace("</tool_call> ", ""), True), (call.replace("f", "fh", 1), False), ("No.", False)):
        tokens = tokenizer.encode(text)
        assert (compiler.compile(constraint).try_consume_tokens(tokens) == len(tokens)) == fits, text


PLAN: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days"],
}
#: A call of `plan` by its arguments, as each format writes them.
WRITTEN: dict[str, Callable[[dict[str, str]], str]] = {
    "qwen3_coder": lambda values: (
        "<tool_call>\n<function=plan>\n"
        + "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
        + "</function>\n</tool_call>"
    ),
    "glm45": lambda values: (
        "<tool_call>plan\n"
        + "".join(f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>" for name, value in values.items())
        + "</tool_call>"
    ),
    "gemma4": lambda values: (
        "<|tool_call>call:plan{" + ",".join(f"{name}:{value}" for name, value in values.items()) + "}<tool_call|>"
    ),
}


def quoted(name: str, text: str) -> str:
    return f'<|"|>{text}<|"|>' if name == "gemma4" else text


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("choice", ["required", "named"])
def test_arguments_of_required_calls_obey_the_schema(name: str, choice: str) -> None:
    tokenizer = Tokenizer.from_folder(POCKET)
    tools = [Tool("function", Function("plan", parameters=PLAN)), Tool("function", Function("stop"))]
    wanted: Any = NamedTool(FunctionName("plan")) if choice == "named" else choice
    format_ = ToolFormat.named(name, NoTokens())
    constraint = format_.constraint(ToolUse(tools, wanted))
    assert constraint is not None and constraint.notes == ()
    compiler = GrammarCompiler(lambda: Vocabulary.of(tokenizer, tokenizer.eos_ids), tokenizer.encode)
    city, tags = quoted(name, 'Os{lo, "x"\n</parameter'), '["a","b"]'
    if name == "gemma4":
        tags = '[<|"|>a<|"|>,<|"|>b<|"|>]'
    whole = {"city": city, "days": "3", "unit": quoted(name, "f"), "tags": tags}
    least = {"city": city, "days": "3"}
    cases = [
        (whole, True),
        (least, True),
        ({"city": city}, False),
        ({"days": "3"}, False),
        ({**least, "days": quoted(name, "three")}, False),
        ({**least, "unit": quoted(name, "k")}, False),
        ({**least, "other": "1"}, False),
    ]
    for values, fits in cases:
        text = WRITTEN[name](values)
        tokens = tokenizer.encode(text)
        matcher = compiler.compile(constraint)
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == fits, text
    message, _ = AnswerParser(OfferedTools(format_, ToolUse(tools, wanted))).whole(WRITTEN[name](whole), "stop")
    (call,) = message.tool_calls or ()
    expected = {"city": 'Os{lo, "x"\n</parameter', "days": 3, "unit": "f", "tags": ["a", "b"]}
    assert json.loads(call.function.arguments) == expected


def test_lengths_of_texts_have_a_note() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
    use = ToolUse([Tool("function", Function("f", parameters=schema))], "required")
    constraint = ToolFormat.named("qwen3_coder", NoTokens()).constraint(use)
    assert constraint is not None
    assert constraint.notes == ("tools: the model's format for calls leaves patterns and lengths of texts unchecked",)
