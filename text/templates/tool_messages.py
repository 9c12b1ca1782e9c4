"""Conversion of tools, calls, results and reasoning to the dictionaries that chat templates expect.

The parameter `change` replaces user strings by stand-ins (see `chat`). Words of letters, digits and `_.-` stay, because
templates compare words such as "string" with constants. No such word can form a control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import msgspec

from ...protocol.requests import Message
from ...protocol.safety.redaction import with_texts
from ...protocol.structured import MAX_DEPTH, Tool, ToolCall, depth_of

Change = Callable[[str], str]
_PLAIN = re.compile(r"[A-Za-z0-9_.-]*")


def tool_as_dict(tool: Tool, change: Change) -> dict[str, Any]:
    """Convert a tool. Drops `strict`, which only the server uses, because models were not trained with `strict`."""
    function = {key: value for key, value in msgspec.to_builtins(tool.function).items() if key != "strict"}
    return _changed({"type": tool.type, "function": function}, change)


def fields(message: Message, change: Change, raw_arguments: bool) -> dict[str, Any]:
    """Return further fields of a message: its reasoning, its tool calls, or the id of the call that it answers.

    `raw_arguments` keeps arguments as text, for templates that expect text.
    """
    extra: dict[str, Any] = {}
    if message.thoughts:  # each template reads the reasoning from one of these names
        extra |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), change(message.thoughts))
    if message.tool_calls:
        extra["tool_calls"] = [_changed(_call_as_dict(call, raw_arguments), change) for call in message.tool_calls]
    if message.tool_call_id is not None:
        extra["tool_call_id"] = _changed(message.tool_call_id, change)
    return extra


def texts(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[str]:
    """Yield all strings in messages' calls and reasoning, and in tools."""
    for tool in tools:
        yield from _strings(msgspec.to_builtins(tool))
    for message in messages:
        yield message.tool_call_id or ""
        yield message.thoughts
        for call in message.tool_calls or ():
            yield from _strings(_call_as_dict(call, False))
            yield call.function.arguments


def arguments_of(call: ToolCall) -> dict[str, Any] | str:
    """Parse the arguments of a call; return the original text if not an object, or nested too deeply."""
    try:
        arguments: Any = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or depth_of(arguments) > MAX_DEPTH:
        return call.function.arguments
    return cast("dict[str, Any]", arguments)


def _call_as_dict(call: ToolCall, raw_arguments: bool) -> dict[str, Any]:
    arguments = call.function.arguments if raw_arguments else arguments_of(call)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}


def _changed(value: Any, change: Change) -> Any:
    return with_texts(value, lambda text: text if _PLAIN.fullmatch(text) else change(text))


def _strings(value: Any) -> list[str]:
    strings: list[str] = []
    with_texts(value, lambda text: strings.append(text) or text)
    return strings
