"""No text of a request is lost: whatever a template reads, each text is in the prompt, or the request is refused."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
from updraft.protocol.errors import ConfigurationError, InvalidRequestError
from updraft.protocol.requests import Message, TextPart
from updraft.protocol.structured import CalledFunction, Function, Tool, ToolCall
from updraft.text.chat import ChatTemplate
from updraft.text.templates.sources import CHATML, TemplateSources

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "data" / "chat-templates"
LISTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate!') }}"
    "{% endif %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
)
OWN = {
    "chatml": CHATML,
    "lists only": LISTS,
    "strings only": "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}",
    "alternating": STRICT,
    "one system": "{{ messages[0].content }}{% for m in messages[1:] if m.role != 'system' %}{{ m.content }}"
    "{% endfor %}",
    "user and assistant": "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}",
    "the last message": "{{ messages[-1].content }}",
    "nothing": "Hello.",
}
CALL = ToolCall("call_of_fifteen", CalledFunction("look_up", '{"city": "Quito <1>"}'))
RESULT = Message("tool", "19 degrees", tool_call_id="call_of_fifteen")
TOOLS = [Tool("function", Function("look_up", "Finds it.", {"type": "object", "properties": {"city": {}}}))]


@cache
def templates() -> dict[str, ChatTemplate]:
    sources = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.rglob("*.jinja*"))}
    return {name: ChatTemplate(source, bos_token="<s>", eos_token="</s>") for name, source in (OWN | sources).items()}


def shapes(text: str) -> Iterator[str | list[TextPart]]:
    yield text
    yield [TextPart(text)]
    yield [TextPart(f"{text} and"), TextPart(' the "rest"\nof it')]
    yield f" \n{text}\n "


def conversations() -> Iterator[list[Message]]:
    others = {"system": ["s"], "developer": ["d"], "both": ["s", "d"], "late": ["u", "a", "s"], "twice": ["u"], "": []}
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    for before in others.values():
        for content in shapes("Words of mine"):
            yield [*(Message(roles[role], f"{role}-{i}") for i, role in enumerate(before)), Message("user", content)]
            yield [*(Message(roles[role], content) for role in before), Message("user", "What?")]
    for content in [None, *shapes("Let me see")]:
        yield [Message("user", "Where?"), Message("assistant", content, tool_calls=[CALL]), RESULT]
        yield [
            Message("user", "?"),
            Message("assistant", content, tool_calls=[CALL]),
            RESULT,
            Message("assistant", "So."),
        ]
    yield [Message("assistant", "I begin."), Message("user", "Go on.")]


def texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        yield message.text.strip()
        for call in message.tool_calls or ():
            yield call.function.name
            yield from json.loads(call.function.arguments).values()


def holds(prompt: str, text: str) -> bool:
    return any(form in prompt for form in (text, json.dumps(text)[1:-1]))


@pytest.mark.parametrize("name", OWN)
def test_every_text_is_in_the_prompt(name: str) -> None:
    check(templates()[name])


@pytest.mark.skipif(not FOLDER.is_dir(), reason="no collection of real chat templates beside this checkout")
@pytest.mark.parametrize("name", sorted({path.name for path in FOLDER.rglob("*.jinja*")}))
def test_every_text_is_in_the_prompt_of_a_real_template(name: str) -> None:
    rendered = check(templates()[name])
    assert rendered or "firefunction" in name  # which wants a variable that no request has


def check(template: ChatTemplate) -> int:
    """The number of conversations it rendered; what it refuses it says."""
    rendered = 0
    for messages, tools in itertools.product(conversations(), ([], TOOLS)):
        try:
            prompt = template.render(messages, tools=tools)
        except InvalidRequestError as error:
            assert "chat template" in error.message
            continue
        rendered += 1
        wanted = [*texts(messages), *(tool.function.name for tool in tools)]
        assert [text for text in wanted if not holds(prompt, text)] == []
    return rendered


@pytest.mark.parametrize("name", ["chatml", "lists only", "strings only", "alternating", "user and assistant"])
def test_templates_that_read_turns_refuse_no_turns(name: str) -> None:
    for messages in conversations():
        templates()[name].render(messages)


def test_a_template_that_reads_one_message_refuses_two() -> None:
    template = templates()["the last message"]
    assert template.render([Message("user", "Hi")]) == "Hi"
    assert template.render([Message("system", "Be brief."), Message("user", "Hi")]) == "Be brief.\n\nHi"
    with pytest.raises(InvalidRequestError, match=r"drops the text of messages\[0\]: .* --chat-template") as caught:
        template.render([Message("user", "Hi"), Message("assistant", "Yes?"), Message("user", "Bye")])
    assert (caught.value.param, caught.value.code) == ("messages[0]", "unsupported_message")


def test_remedies_are_the_mildest_that_help() -> None:
    developer = [Message("developer", "Be brief."), Message("user", "Hi")]
    assert templates()["chatml"].render(developer).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    knows = "{# developer #}{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    assert ChatTemplate(knows).render(developer) == "developer: Be brief. user: Hi "
    assert templates()["alternating"].render(developer) == "[user]Be brief.\n\nHi"
    assert templates()["lists only"].render(developer) == "<|system|>Be brief.<|user|>Hi"
    greeted = [Message("assistant", "Hello!"), Message("user", "Hi")]
    assert templates()["alternating"].render(greeted) == "[user][assistant]Hello![user]Hi"
    twice = [Message("user", "Hi"), Message("user", "there")]
    assert templates()["alternating"].render(twice) == "[user]Hi\n\nthere"


def test_calls_are_text_where_the_template_knows_none() -> None:
    history = [Message("user", "Where?"), Message("assistant", "Hm.", tool_calls=[CALL]), RESULT]
    prompt = ChatTemplate(CHATML).render(history, tools=TOOLS, add_generation_prompt=False)
    call = '{"name": "look_up", "arguments": {"city": "Quito <1>"}}'
    assert f"<|im_start|>assistant\nHm.\n<tool_call>\n{call}\n</tool_call><|im_end|>" in prompt
    assert prompt.endswith("<|im_start|>user\n<tool_response>\n19 degrees\n</tool_response><|im_end|>\n")
    assert prompt.startswith("<|im_start|>system\nYou can call these functions:\n{")
    llama = ChatTemplate(TemplateSources(CHATML, tool_style="llama3")).render(history)
    assert 'Hm.\n{"name": "look_up", "parameters": {"city": "Quito <1>"}}' in llama


def test_arguments_are_text_for_templates_that_add_them_to_text() -> None:
    source = CHATML.replace(
        "<|im_end|>",
        "{% for c in message.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}<|im_end|>",
    )
    history = [Message("user", "Where?"), Message("assistant", None, tool_calls=[CALL]), RESULT]
    assert 'look_up{"city": "Quito <1>"}<|im_end|>' in ChatTemplate(source).render(history)


def test_words_beside_a_call_that_a_template_drops_get_a_turn_of_their_own() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}: {% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments | tojson }}{% else %}{{ m.content }}{% endif %} {% endfor %}"
    )
    history = [Message("user", "Where?"), Message("assistant", "Hm.", tool_calls=[CALL]), RESULT]
    expected = 'user: Where? assistant: Hm. assistant: look_up{"city": "Quito <1>"} tool: 19 degrees '
    assert ChatTemplate(source).render(history) == expected


def test_the_template_named_tool_use_serves_tools() -> None:
    named = TemplateSources.named({"tool_use": "tools: {{ tools | tojson }}" + CHATML, "default": CHATML})
    assert named is not None
    template = ChatTemplate(named)
    assert template.render([Message("user", "Hi")], tools=TOOLS).startswith('tools: [{"type": "function"')
    assert template.render([Message("user", "Hi")]).startswith("<|im_start|>")


def test_users_text_survives_a_template_that_drops_thoughts() -> None:
    """Thoughts of the assistant may go, as models are trained; words of a user may not."""
    source = CHATML.replace("message.content", "message.content.split('</think>')[-1]")
    messages = [Message("user", "What is </think> for?"), Message("assistant", "hm</think>It ends.")]
    prompt = ChatTemplate(source).render(messages)
    assert "What is </think> for?" in prompt
    assert "It ends." in prompt


def test_template_sources(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = TemplateSources("own")
    assert TemplateSources.of("m", own, None, ()) is own
    assert TemplateSources.of("m", own, "chatml", ()).default == CHATML
    path = tmp_path / "t.jinja"
    path.write_text("given", encoding="utf-8-sig")
    assert TemplateSources.of("m", own, str(path), ()).default == "given"
    assert caplog.messages == []
    assert TemplateSources.of("m", None, None, ["<|im_start|>"]).default == CHATML
    bare = ChatTemplate(TemplateSources.of("m", None, None, ["<start_of_turn>"]))
    assert (
        bare.render([Message(role="system", content="Be brief."), Message(role="user", content="hi")])
        == "Be brief.\nhi\n"
    )
    assert "m has no chat template: using ChatML" in caplog.text
    with pytest.raises(ConfigurationError, match="give `chatml` or the path of a Jinja file"):
        TemplateSources.of("m", own, str(tmp_path / "none"), ())


@pytest.mark.parametrize("source", [CHATML, STRICT], ids=["taken as it is", "joined"])
@pytest.mark.parametrize("role", ["user", "system"])
def test_the_work_grows_as_the_number_of_messages_does(source: str, role: Literal["user", "system"]) -> None:
    """Four times the messages take some four times the processor's time; if each were compared with all, sixteen."""

    def seconds(count: int) -> float:
        template = ChatTemplate(source)
        begin = time.process_time()
        template.segments([Message(role, "x")] * count)
        return time.process_time() - begin

    few = many = math.inf
    for _ in range(10):  # other processes may disturb any measurement, but not the fastest of many
        few, many = min(few, seconds(4_000)), min(many, seconds(16_000))
        if many < 9 * few:
            return
    pytest.fail(f"{many / few:.1f} times the processor's time")
