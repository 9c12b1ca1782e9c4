"""Completion of a chat's history: ids and arguments of tool calls, ids of their results, and empty contents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from .hints import object_of

_Object = dict[str, Any]
#: Fields with which an assistant message needs no content.
_CONTENTS = ("refusal", "reasoning_content", "reasoning", "audio", "function_call", "tool_calls")


def whole_turns(fields: Mapping[str, Any], *, has_custom_tools: bool = True) -> Mapping[str, Any]:
    """Return a chat request with a complete history. Malformed messages stay unchanged.

    `has_custom_tools`: whether the model can call custom tools. If not, `as_function` rewrites earlier calls.
    """
    messages: Any = fields.get("messages")
    if not isinstance(messages, list):
        return fields
    calls: list[_Object] = []
    turns = enumerate(cast("list[Any]", messages))
    made = [_whole(object_of(each), index, calls, has_custom_tools) or each for index, each in turns]
    return {**fields, "messages": made}


def as_function(call: _Object) -> _Object:
    """Return the call of a custom tool as the call of a function, with the tool's text as argument `input`."""
    custom = object_of(call.get("custom"))
    arguments = json.dumps({"input": custom.get("input")}, ensure_ascii=False)
    function = {"name": custom.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": function} if custom else call


def _whole(turn: _Object, index: int, unanswered: list[_Object], has_custom_tools: bool) -> _Object:
    """Complete a message. A tool result without an id gets the id of the call with its tool's name, or else of the
    oldest unanswered call."""
    role, calls = turn.get("role"), turn.get("tool_calls")
    if role == "assistant" and isinstance(calls, list) and calls:
        given = enumerate(cast("list[Any]", calls))
        whole = [_whole_call(call, f"call_{index}_{at}", has_custom_tools) for at, call in given]
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


def _whole_call(call: Any, otherwise: str, has_custom_tools: bool) -> Any:
    """Return a call with arguments as text and with its id, or with the id `otherwise` if it has none."""
    whole = object_of(call) if has_custom_tools else as_function(object_of(call))
    function = object_of(whole.get("function"))
    arguments = function.get("arguments")
    if function and not isinstance(arguments, str):
        text = msgspec.json.encode(arguments).decode()
        whole = {**whole, "function": {**function, "arguments": "{}" if text == "null" else text}}
    return call if not whole else whole if whole.get("id") else {**whole, "id": otherwise}
