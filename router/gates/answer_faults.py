"""Checks that precede every score: faults of a finished local answer that anybody can see."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, cast

from ...protocol.requests import ChatRequest
from ...protocol.responses import AssistantMessage
from ...protocol.structured import ToolCall, ToolUse
from ...text.tool_stream import AnswerSyntax, OfferedTools
from ..tiers.interfaces import LocalAnswer

_REFUSAL = re.compile(
    r"\W*(?:(?:i'?m|i am) (?:very |so )?sorry\b|i (?:can(?:no|')t|am (?:not able|unable) to|won't) |as an ai\b)",
    re.IGNORECASE,
)
_JSON_BLOCK = re.compile(r"^```json[ \t]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


def fault_of(answer: LocalAnswer, chat: ChatRequest, tools: OfferedTools | None) -> str | None:
    """Return what is wrong with a finished answer, or None. `tools`: those that the answer may call."""
    if not answer.text.strip():
        return "the device gave an empty answer"
    if answer.finish_reason == "length" and answer.stop_reason is not None:
        repeated = answer.stop_reason == "repetition_detected"
        return "the device's answer repeated itself" if repeated else "the device's answer was cut off"
    parser = AnswerSyntax(tools, answer.reasoning).parser()
    message = AssistantMessage(answer.text)
    if parser is not None:
        message, _ = parser.whole(answer.text, answer.finish_reason)
    text, calls = message.content or "", message.tool_calls or []
    if tools is not None and (fault := _fault_of_calls(calls, tools.use)) is not None:
        return fault
    if calls:
        return None
    if not text.strip():
        return "the device gave thoughts, but no answer"
    if _wants_json(chat) and not _is_json(text):
        return "the device's answer is not the JSON that was asked for"
    if any(not _is_json(block) for block in _JSON_BLOCK.findall(text)):
        return "the device's answer has a JSON block that cannot be parsed"
    return "the device refused to answer" if _REFUSAL.match(text) else None


def _fault_of_calls(calls: Sequence[ToolCall], use: ToolUse) -> str | None:
    """Return what is wrong with an answer's tool calls. Calls of unknown tools are text, not calls."""
    if not calls:
        return "the device called no tool" if use.choice not in (None, "auto") else None
    required = {tool.function.name: (tool.function.parameters or {}).get("required") for tool in use.tools}
    for call in calls:
        arguments = _parsed(call.function.arguments or "{}")
        if not isinstance(arguments, dict):
            return f"the device called {call.function.name} with arguments that are no JSON object"
        names = required.get(call.function.name)
        missing = (
            [name for name in cast("list[Any]", names) if name not in arguments] if isinstance(names, list) else []
        )
        if missing:
            return f"the device called {call.function.name} without {', '.join(map(str, missing))}"
    return None


def _wants_json(chat: ChatRequest) -> bool:
    constraint = chat.constraint()
    return constraint is not None and constraint.kind == "json_schema"


def _is_json(text: str) -> bool:
    return _parsed(text) is not _BROKEN


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _BROKEN


_BROKEN = object()
