"""Reasoning is separated from answers, for any cuts of the text; tool calls inside reasoning do not count."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.protocol.sampling import SamplingParams
from updraft.protocol.structured import Function, Tool, ToolUse
from updraft.text.templates.reasoning import ReasoningSplitter, ReasoningStyle
from updraft.text.tool_calls import ToolSyntax
from updraft.text.tool_formats import ToolFormat
from updraft.text.tool_stream import AnswerParser, AnswerSyntax, OfferedTools

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
FORMAT = ToolFormat("hermes", ToolSyntax("<tool_call>", "</tool_call>"), {})
TOOLS = OfferedTools(FORMAT, ToolUse([Tool("function", Function("f"))], "auto", parallel=False))


def split(pieces: list[str], *, begun: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(ReasoningStyle(begun))
    parts = [*map(splitter.push, pieces), splitter.flush()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("text", "begun", "thoughts", "answer"),
    [
        ("<think>\nHm.\n</think>\n\n42", False, "Hm.", "42"),
        ("\n<think></think>42", False, "", "42"),
        ("Hm.\n</think>\n42", True, "Hm.", "42"),
        ("<think>Hm.</think>42", True, "Hm.", "42"),
        ("42 <think>is text</think>", False, "", "42 <think>is text</think>"),
        ("<thin", False, "", "<thin"),
        ("<think>Hm. </thin", False, "Hm. </thin", ""),
        ("<think>Hm.</think>a</think> b", False, "Hm.", "a</think> b"),
        ("<think>a<think>b</think>c</think>d", False, "a<think>b", "c</think>d"),
        ("<think>a</THINK></think >b", False, "a</THINK></think >b", ""),
        ("<think><think></think></think>", False, "<think>", "</think>"),
        ("\u200b<think>a</think>", False, "", "\u200b<think>a</think>"),
        ("", True, "", ""),
    ],
)
def test_thoughts_and_answer(text: str, begun: bool, thoughts: str, answer: str) -> None:
    assert split([text], begun=begun) == (thoughts, answer)
    assert split(list(text), begun=begun) == (thoughts, answer)


WORDS = st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "<thi", "nk>"])


@given(st.lists(WORDS, max_size=12), st.integers(0, 40), st.booleans())
def test_reasoning_parses_at_any_split(words: list[str], at: int, begun: bool) -> None:
    text = "".join(words)
    whole = split([text], begun=begun)
    assert split([text[:at], text[at:]], begun=begun) == whole
    assert split(list(text), begun=begun) == whole
    bare = text.replace("<think>", "", 1).replace("</think>", "", 1)
    assert len("".join(whole).replace(" ", "").replace("\n", "")) >= len("".join(bare.split())), "nothing is lost"


def test_call_inside_thoughts_is_ignored() -> None:
    text = f"<think>I could write {CALL}</think>{CALL}"
    message, reason = AnswerParser(TOOLS, ReasoningStyle()).whole(text, "stop")
    assert reason == "tool_calls"
    assert message.reasoning_content == f"I could write {CALL}"
    assert [call.function.name for call in message.tool_calls] == ["f"]
    message, reason = AnswerParser(TOOLS, ReasoningStyle()).whole(f"<think>{CALL}</think>No.", "stop")
    assert (message.content, reason, message.tool_calls or []) == ("No.", "stop", [])
    limit = AnswerSyntax(TOOLS, ReasoningStyle()).end(SamplingParams(repetition_detection=False), None)
    assert limit.push(f"<think>{CALL}</think>") == (f"<think>{CALL}</think>", False)
    assert limit.push(f"{CALL} more") == (CALL.removesuffix("\n</tool_call>"), True)


@pytest.mark.parametrize(
    ("source", "prompt_end", "style"),
    [
        ("{{ messages[0].content }}", "<|im_start|>assistant\n", None),
        ("{{ '<think>' }}", "<|im_end|>\n<|im_start|>assistant\n<think>\n", ReasoningStyle(True)),
        ("{{ '<think>' }}", "assistant\n<think>\n\n</think>\n\n", ReasoningStyle(False)),
        ("{{ '<think>' }}", "assistant\n</think>", ReasoningStyle(False)),
        ("{{ '<think>' + reasoning }}", "<|im_start|>assistant\n", ReasoningStyle(False)),
        ("{{ '<' + 'think>' }}", "assistant\n<think>Okay,", ReasoningStyle(True)),
        ("", "<|turn>model\n<|channel>thought\n", ReasoningStyle(True, "<|channel>thought", "<channel|>")),
        ("'[/THINK]'", "[/INST]", ReasoningStyle(False, "[THINK]", "[/THINK]")),
    ],
)
def test_the_prompt_decides_whether_reasoning_is_open(source: str, prompt_end: str, style: Any) -> None:
    assert ReasoningStyle.of(source, prompt_end) == style


GEMMA = ReasoningStyle(False, "<|channel>thought", "<channel|>")


@pytest.mark.parametrize(
    ("style", "text", "stop", "ends_at"),
    [
        (ReasoningStyle(), "<think>is it?</think>\n\nIt is so.", ("is",), "<think>is it?</think>\n\nIt "),
        (ReasoningStyle(True), "is it?</think>\n\nIt is so.", ("is",), "is it?</think>\n\nIt "),
        (ReasoningStyle(True), "is it?</think>is", ("think>is", "</think>", "?<"), None),
        (ReasoningStyle(True), "a\n\nb</think>\n\nc\n\nd", ("\n\n",), "a\n\nb</think>\n\nc"),
        (ReasoningStyle(True), "is it? </thi", ("is", "</"), None),
        (ReasoningStyle(), " <thin", ("<t",), " "),
        (ReasoningStyle(), "It is", ("is",), "It "),
        (GEMMA, "<|channel>thought\nis<channel|>It is", ("is",), "<|channel>thought\nis<channel|>It "),
        (None, "<think>is", ("is",), "<think>"),
    ],
)
@given(data=st.data())
def test_stop_strings_act_on_the_answer_at_any_split(
    style: Any, text: str, stop: tuple[str, ...], ends_at: str | None, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    end = AnswerSyntax(None, style).end(SamplingParams(stop=stop), None)
    shown, ended = "", False
    for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True):
        if not ended:
            more, ended = end.push(text[first:last])
            shown += more
    if not ended:
        more, ended = end.flush()
        shown += more
    assert (shown, ended) == (text if ends_at is None else ends_at, ends_at is not None)
    assert (end.stop is not None) == ended
