"""Order of the parts of an assistant message. The fields of a chat message have one order: reasoning, text, tool calls.

A message that was written in another order also has the field `deltas`: its parts as messages in that one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, cast

from ..http.lenient_json import object_of, objects_of
from .chat_chunks import text_of

#: Fields in the order in which readers take them from a message.
_ORDER = ("reasoning_content", "thinking_blocks", "content", "annotations", "citations", "extra_content", "tool_calls")
#: Fields that end a piece: the end of a text block, and the signature of a part.
_ENDS = ("citations", "extra_content")


def pieces_of(deltas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join deltas to as few pieces as possible without a change of order. Anthropic's `citations` end a text block,
    even if empty."""
    pieces, last = list[dict[str, Any]](), len(_ORDER)
    for delta in deltas:
        for place, name in enumerate(_ORDER):
            value = delta.get(name)
            if not value and not (name == "citations" and isinstance(value, list)):
                continue
            if place < last:
                pieces.append({})
            pieces[-1][name] = _joined(name, pieces[-1].get(name), value)
            last = len(_ORDER) if name in _ENDS else place
    return [_whole(piece) for piece in pieces]


def order_of(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the field `deltas` of the message that these deltas form, or no field if the message needs none."""
    pieces = pieces_of(deltas)
    return {"deltas": pieces} if len(pieces) > 1 or any("citations" in piece for piece in pieces) else {}


def message_of(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant message that the deltas form, with the deltas themselves if their order is another one. Only
    these have the citations."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for name, value in (field for delta in deltas for field in delta.items() if field[0] != "citations"):
        message[name] = _joined(name, message.get(name), value)
    return _whole(message) | ({"deltas": deltas} if order_of(deltas) else {})


def in_order(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pieces of a history's message as messages. A message whose text or calls differ from its `deltas` was
    changed by the caller, and is returned alone."""
    pieces, calls = pieces_of(objects_of(message.get("deltas"))), objects_of(message.get("tool_calls"))
    texts = [piece["content"] for piece in pieces if "content" in piece]
    text: Any = texts[0] if len(texts) == 1 else "".join(map(text_of, texts))
    counts = [len(objects_of(piece.get("tool_calls"))) for piece in pieces]
    if not pieces or text != (message.get("content") or "") or sum(counts) != len(calls):
        return [_without_order(message)]
    rest = iter(calls)  # the message's own calls, whose IDs and arguments are complete
    counted = zip(pieces, counts, strict=True)
    return [{"role": "assistant", **piece, "tool_calls": list(islice(rest, count))} for piece, count in counted]


def without_order(body: dict[str, Any]) -> dict[str, Any]:
    """Return a chat request whose messages have no `deltas`, which only Updraft knows."""
    if not any("deltas" in message for message in objects_of(body.get("messages"))):
        return body
    return {**body, "messages": [_without_order(message) for message in body["messages"]]}


def _without_order(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "deltas"}


class _Texts(list[str]):
    """Texts to join at the end, since adding each to a long text would take quadratic time."""


def _joined(name: str, before: Any, value: Any) -> Any:
    """Join the values of a field; lists grow in place. A call without a type continues the call before it."""
    if isinstance(value, str):
        texts = before if isinstance(before, _Texts) else _Texts()
        texts.append(value)
        return texts
    if not isinstance(value, list):
        return value
    is_list = isinstance(before, list) and not isinstance(before, _Texts)
    joined = cast("list[Any]", before) if is_list else list[Any]()
    for entry in objects_of(value):
        if name == "tool_calls" and joined and "type" not in entry:
            joined[-1] = _continued(joined[-1], object_of(entry.get("function")))
        else:
            joined.append(entry)
    return joined


def _continued(call: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    function = object_of(call.get("function"))
    arguments = function.get("arguments")
    if not isinstance(arguments, _Texts):
        arguments = _Texts([text_of(arguments)])
        call = {**call, "function": {**function, "arguments": arguments}}
    arguments.append(text_of(added.get("arguments")))
    return call


def _whole(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with all `_Texts` joined."""
    for function in (object_of(call.get("function")) for call in objects_of(fields.get("tool_calls"))):
        if isinstance(arguments := function.get("arguments"), _Texts):
            function["arguments"] = "".join(arguments)
    return {name: "".join(value) if isinstance(value, _Texts) else value for name, value in fields.items()}
