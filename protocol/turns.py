"""Completion of a chat's history: ids and arguments of tool calls, ids of their results, and null contents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

_Object = dict[str, Any]
#: Fields of assistant messages that may stand instead of a content.
_CONTENTS = ("tool_calls", "refusal", "reasoning_content", "reasoning", "audio", "function_call")


def whole_turns(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a chat request with a complete history. Malformed messages stay unchanged.

    A result without an id answers the call of its `tool_name` or `name`, else the oldest call without a result.
    """
    messages: Any = fields.get("messages")
    if not isinstance(messages, list):
        return fields
    turns: list[Any] = []
    unanswered: list[_Object] = []
    for index, message in enumerate(cast("list[Any]", messages)):
        turn = _object(message)
        if turn.get("role") == "assistant":
            turn = _whole_assistant(turn, index)
            unanswered = [call for call in turn.get("tool_calls") or () if _object(call)] or unanswered
        elif turn.get("role") == "tool":
            turn = _whole_result(turn, unanswered)
        turns.append(turn or message)
    return {**fields, "messages": turns}


def _object(value: Any) -> _Object:
    return cast("_Object", value) if isinstance(value, dict) else {}


def _whole_assistant(message: _Object, index: int) -> _Object:
    calls: Any = message.get("tool_calls")
    if calls and isinstance(calls, list):
        whole = [_whole_call(call, f"call_{index}_{number}") for number, call in enumerate(cast("list[Any]", calls))]
        return {**message, "tool_calls": whole}
    is_empty = message.get("content") is None and not any(message.get(name) for name in _CONTENTS)
    return {**message, "content": ""} if is_empty else message


def _whole_call(call: Any, otherwise: str) -> Any:
    """Return a call with an id, or else the id `otherwise`, and with arguments as text."""
    whole, function = _object(call), _object(_object(call).get("function"))
    if not function:
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        text = "{}" if arguments is None else msgspec.json.encode(arguments).decode()
        whole = {**whole, "function": {**function, "arguments": text}}
    return whole if whole.get("id") else {**whole, "id": otherwise}


def _whole_result(message: _Object, unanswered: list[_Object]) -> _Object:
    """Return a result with content and the id of its call, which is removed from `unanswered`."""
    call_id, name = message.get("tool_call_id"), message.get("tool_name") or message.get("name")
    by_id = [call for call in unanswered if call.get("id") == call_id]
    by_name = [call for call in unanswered if name and _object(call.get("function")).get("name") == name]
    answered = next(iter(by_id or by_name or unanswered[:1]), None) if by_id or call_id is None else None
    if answered is not None:
        unanswered.remove(answered)
    if call_id is not None and message.get("content") is not None:
        return message
    found = {} if call_id is not None or answered is None else {"tool_call_id": answered.get("id")}
    return {**message, **found, "content": message.get("content") or ""}
