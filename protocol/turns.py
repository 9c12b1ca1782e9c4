"""Completion of a chat's history: ids and arguments of tool calls, ids of their results, and null contents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from .hints import object_of

_Object = dict[str, Any]
#: Fields with which an assistant message needs no content.
_CONTENTS = ("refusal", "reasoning_content", "reasoning", "audio", "function_call", "tool_calls")


def whole_turns(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a chat request with a complete history. Malformed messages stay unchanged."""
    messages: Any = fields.get("messages")
    if not isinstance(messages, list):
        return fields
    calls: list[_Object] = []
    turns = enumerate(cast("list[Any]", messages))
    return {**fields, "messages": [_whole(object_of(each), index, calls) or each for index, each in turns]}


def _whole(turn: _Object, index: int, unanswered: list[_Object]) -> _Object:
    """Complete a message. A result without an id answers the call of its name, else the oldest unanswered call."""
    role, calls = turn.get("role"), turn.get("tool_calls")
    if role == "assistant" and isinstance(calls, list) and calls:
        whole = [_whole_call(call, f"call_{index}_{at}") for at, call in enumerate(cast("list[Any]", calls))]
        unanswered[:] = filter(object_of, whole)
        turn = {**turn, "tool_calls": whole}
    elif role == "tool":
        call_id, name = turn.get("tool_call_id"), turn.get("tool_name") or turn.get("name")
        names = [object_of(call.get("function")).get("name") if call_id is None else None for call in unanswered]
        ids = [call.get("id") for call in unanswered]
        at = ids.index(call_id) if call_id in ids else names.index(name) if name in names else 0
        if ids and (call_id is None or call_id in ids):
            turn = {**turn, "tool_call_id": unanswered.pop(at).get("id")}
    is_empty = turn.get("content") is None and not any(turn.get(name) for name in _CONTENTS)
    return {**turn, "content": ""} if is_empty and role in ("assistant", "tool") else turn


def _whole_call(call: Any, otherwise: str) -> Any:
    """Return a call with arguments as text and with its id, or with the id `otherwise` if it has none."""
    whole, function = object_of(call), object_of(object_of(call).get("function"))
    arguments = function.get("arguments")
    if function and not isinstance(arguments, str):
        text = "{}" if arguments is None else msgspec.json.encode(arguments).decode()
        whole = {**whole, "function": {**function, "arguments": text}}
    return call if not whole else whole if whole.get("id") else {**whole, "id": otherwise}
