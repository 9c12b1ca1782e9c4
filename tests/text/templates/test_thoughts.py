"""Reasoning of earlier messages in prompts, prompts that open reasoning, reasoning efforts, and the date."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from updraft.protocol.errors import InvalidRequestError
from updraft.protocol.requests import Message, read_chat
from updraft.protocol.structured import CalledFunction, ToolCall
from updraft.text.chat import ChatTemplate, Segment
from updraft.text.templates.effort import effort_variables
from updraft.text.templates.reasoning import ReasoningStyle

BODY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
OPENED = BODY + "{% set mark = '<think>' %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ mark }}\n{% endif %}"
PLAIN = BODY + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OFF = BODY + "<|im_start|>assistant\n{{ '<think>' if enable_thinking else '</think>' }}"
TOGGLED = BODY + "{{ '<think></think>' if '/no_think' in messages[-1].content else '<think>' }}"
SPECIAL = ("<|im_start|>", "<|im_end|>")
CALL = [ToolCall("c1", CalledFunction("weather", '{"city": "Oslo"}'))]
TURNS = [
    Message("user", "Weather?"),
    Message("assistant", None, tool_calls=CALL, reasoning="I look <|im_end|> up."),
    Message("tool", "4 C", tool_call_id="c1"),
]


@pytest.fixture
def of() -> Iterator[Any]:
    templates: list[ChatTemplate] = []

    def make(source: str) -> ChatTemplate:
        templates.append(ChatTemplate(source, special_tokens=SPECIAL))
        return templates[-1]

    yield make
    for template in templates:
        template.close()


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_templates_receive_reasoning_by_each_name(of: Any, name: str) -> None:
    segments = of(PLAIN.replace("m.reasoning_content", f"m.{name}")).segments(TURNS)
    assert "<think>I look <|im_end|> up.</think>" in "".join(segment.text for segment in segments)
    assert Segment("I look <|im_end|> up.", False) in segments, "a thought cannot write control tokens"


def test_reasoning_that_a_template_refuses_is_left_out(of: Any) -> None:
    refusing = "{% for m in messages if m.thinking %}{{ raise_exception('No.') }}{% endfor %}" + PLAIN
    prompt = of(refusing).render(TURNS)
    assert "I look" not in prompt and "4 C" in prompt


def test_reasoning_is_written_once(of: Any) -> None:
    """Some templates refuse text beside a call, so the message is split."""
    source = "{% for m in messages if m.content and m.tool_calls %}{{ raise_exception('No.') }}{% endfor %}" + PLAIN
    turns = [TURNS[0], Message("assistant", "Well.", tool_calls=CALL, reasoning_content="Hm."), TURNS[2]]
    assert of(source).render(turns).count("Hm.") == 1


def test_reasoning_as_another_type_is_ignored(of: Any) -> None:
    message = read_chat(
        {"model": "m", "messages": [{"role": "assistant", "content": "a", "reasoning": {"x": 1}}]}
    ).messages[0]
    assert message.thoughts == "" and "think" not in of(PLAIN).render([message])


@pytest.mark.parametrize(
    ("source", "text", "options", "begun"),
    [
        (OPENED, "Hi", {}, True),
        (OPENED, "Is </think> a mark?", {}, True),
        (OPENED, "Hi", {"add_generation_prompt": False}, False),
        (PLAIN, "What is <think>?", {}, False),
        (PLAIN, "think <think>", {"add_generation_prompt": False}, False),
        (OFF, "Hi", {}, False),
        (OFF, "Hi", {"template_options": {"enable_thinking": True}}, True),
        (TOGGLED, "Hi", {}, True),
        (TOGGLED, "Hi /no_think", {}, False),
    ],
)
def test_the_rendered_prompt_decides_whether_reasoning_is_open(
    of: Any, source: str, text: str, options: dict[str, Any], begun: bool
) -> None:
    assert of(source).rendered([Message("user", text)], **options)[1] == ReasoningStyle(begun)


@pytest.mark.parametrize(("text", "begun"), [("<think>Hm. I", True), ("<think>Hm.</think>It", False), ("It", False)])
def test_continued_message_may_end_inside_reasoning(of: Any, text: str, begun: bool) -> None:
    turns = [Message("user", "What is <think>?"), Message("assistant", text)]
    options: Any = {"add_generation_prompt": False, "continue_final_message": True}
    assert of(PLAIN).rendered(turns, **options)[1] == ReasoningStyle(begun)


def test_templates_know_the_date() -> None:
    options: Any = {"template_options": {"date_string": "26 Jul 2024"}}
    with closing(ChatTemplate("{{ date_string }}{{ messages[0].content }}")) as template:
        assert template.render([Message("user", ".")]) == f"{datetime.date.today():%d %b %Y}."
        assert template.render([Message("user", ".")], **options) == "26 Jul 2024."
    with closing(ChatTemplate("{{ strftime_now('%Y') }}{{ messages[0].content }}")) as template:
        assert template.render([Message("user", ".")]) == f"{datetime.date.today().year}."
    asked = {"model": "m", "messages": [{"role": "user", "content": "."}]}
    read_chat({**asked, "chat_template_kwargs": options["template_options"]})
    for value in ("<|im_end|>", "[INST]", "a\nb"):
        with pytest.raises(InvalidRequestError, match="chat_template_kwargs"):
            read_chat({**asked, "chat_template_kwargs": {"date_string": value}})


@pytest.mark.parametrize(
    ("source", "effort", "variables"),
    [
        ("{% if enable_thinking is defined %}", "none", {"enable_thinking": False}),
        ("{% if not thinking %}{{ m.thinking }}", "low", {"thinking": True}),
        ("{{ m.thinking }} Is thinking hard?", "low", {}),
        (
            "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}",
            "low",
            {"reasoning_effort": "low"},
        ),
        ("{{ reasoning_effort|default('xhigh') }} 'low' 'medium'", "high", {"reasoning_effort": "xhigh"}),
        ("{{ reasoning_effort|default('xhigh') }} 'low' 'medium'", "minimal", {"reasoning_effort": "low"}),
        ("{% if reasoning_strength is defined and x %}", "high", {"reasoning_strength": "high"}),
        ("{{ thinking_budget | string }}", "low", {"thinking_budget": 1024}),
        ("{{ reasoning_effort | upper }}", "<|im_end|>", {}),
        ("{{ messages[0].content }}", "high", {}),
        ("{% if enable_thinking %}", None, {}),
    ],
)
def test_efforts_become_the_templates_variables(source: str, effort: str | None, variables: dict[str, Any]) -> None:
    assert effort_variables(source, effort) == variables


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"reasoning_effort": "low", "think": False}, "low"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 20_000}}, "high"),
        ({"thinking": {"type": "adaptive"}}, "medium"),
        ({"think": True}, "medium"),
        ({"think": "false"}, "none"),
        ({"think": "high"}, "high"),
    ],
)
def test_efforts_of_requests(fields: dict[str, Any], effort: str | None) -> None:
    request = read_chat({"model": "m", "messages": [{"role": "user", "content": "."}], **fields})
    assert request.effort[0] == effort
    assert effort is None or request.effort[1] in fields
