"""Tools, calls and their results as chat templates want to see them: plain dictionaries, arguments parsed.

What users wrote in them goes through `change`, as `chat` says, but for words made of letters, digits and `_.-` alone:
templates compare those ("string", "function") with their own, and no control token is made of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import msgspec

from ...protocol.requests import Message
from ...protocol.structured import MAX_DEPTH, Tool, ToolCall, depth_of

Change = Callable[[str], str]
_PLAIN = re.compile(r"[A-Za-z0-9_.-]*")


def tool_as_dict(tool: Tool, change: Change) -> dict[str, Any]:
    """`strict` is left out: it is for the server, and models were not trained to see it."""
    function = {key: value for key, value in msgspec.to_builtins(tool.function).items() if key != "strict"}
    return _changed({"type": tool.type, "function": function}, change)


def fields(message: Message, change: Change, raw_arguments: bool) -> dict[str, Any]:
    """The parts of a turn beyond role, content and name: calls of tools, or the id of the call it answers.

    `raw_arguments`: they stay text, for templates that want them so.
    """
    found: dict[str, Any] = {}
    if message.tool_calls:
        found["tool_calls"] = [_changed(_call_as_dict(call, raw_arguments), change) for call in message.tool_calls]
    if message.tool_call_id is not None:
        found["tool_call_id"] = _changed(message.tool_call_id, change)
    return found


def texts(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[str]:
    """All strings in these, for whoever needs their characters."""
    for tool in tools:
        yield from _strings(msgspec.to_builtins(tool))
    for message in messages:
        yield message.tool_call_id or ""
        for call in message.tool_calls or ():
            yield from _strings(_call_as_dict(call, False))
            yield call.function.arguments


def arguments_of(call: ToolCall) -> dict[str, Any] | str:
    """As an object; as the model wrote them where they are none, or too deep."""
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
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else change(value)
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    if isinstance(value, dict):
        return {_changed(key, change): _changed(item, change) for key, item in value.items()}
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
