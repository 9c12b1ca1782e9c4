"""Answers of both tiers to an escalated request, including tool calls, in a form that can be graded."""

from __future__ import annotations

from typing import Any

import msgspec

from ...classifier.grading.agreement import ComparableAnswer
from ...protocol.decoding import prepare_types
from ...text.tool_stream import AnswerParser
from ..tiers.interfaces import LocalAnswer


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    """The fields of a chat message that a grade depends on. Other fields are ignored."""

    content: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


prepare_types(_Message)


def local_comparable_answer(answer: LocalAnswer, reader: AnswerParser | None) -> ComparableAnswer:
    """Return the local answer in gradable form. `reader`: parser of reasoning and tool calls in the text."""
    reason = answer.finish_reason or "stop"
    if reader is None:
        return ComparableAnswer(answer.text, reason)
    message, reason = reader.whole(answer.text, reason)
    calls = tuple((call.function.name, call.function.arguments) for call in message.tool_calls or ())
    return ComparableAnswer(message.content or "", reason or "stop", calls)


def cloud_comparable_answer(choice: dict[str, Any]) -> ComparableAnswer | None:
    """Return the cloud's answer in gradable form; None unless it is text, a refusal, or function calls."""
    try:
        message = msgspec.convert(choice["message"], _Message)
    except msgspec.ValidationError:
        return None
    calls = tuple((call.function.name, call.function.arguments) for call in message.tool_calls or ())
    if message.content is None and message.refusal is None and not calls:
        return None
    return ComparableAnswer(message.content or "", choice.get("finish_reason") or "stop", calls)
