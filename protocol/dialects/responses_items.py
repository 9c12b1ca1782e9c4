"""Translation of Responses API items to chat messages."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from typing import Any

from ..errors import UnsupportedFeatureError, invalid_value
from ..http.lenient_json import json_bytes, json_of, objects_of, tables
from .chat_chunks import blocks_of, content_of, message_of, text_of

Item = dict[str, Any]
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}
#: Fields of calls and their outputs that must be strings.
_CALL_FIELDS = {"function_call": ("call_id", "name", "arguments"), "custom_tool_call": ("call_id", "name", "input")}
_COMPACTED = "updraft-1."  # start of the content of compaction items that this server can read
_PRIVATE = f"{_COMPACTED}private."  # the same, for a conversation that must stay on the device
_ROLES = ("user", "assistant", "system", "developer")


def item_id(kind: str) -> str:
    """Create an item id in OpenAI's format."""
    return f"{_PREFIXES[kind]}_{secrets.token_hex(24)}"


def items_of(given: str | Sequence[Item]) -> list[Item]:
    """Convert the input to items with type, id and status; references stay as they are. Raises InvalidRequestError."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_full(item, f"input[{index}]") for index, item in enumerate(given) if not is_vendor_item(item)]


def is_vendor_item(item: Item) -> bool:
    """Return whether an item is left out: it belongs to a vendor's tool or conversation, and no model here can read it.
    Examples are compactions by other servers, and items of unknown types without text."""
    kind = str(item.get("type") or "message")
    if kind == "compaction":
        return not str(item.get("encrypted_content")).startswith(_COMPACTED)
    is_read = kind in (*_PREFIXES, "item_reference") or kind.startswith("input_")
    return not is_read and not text_of(item.get("content"))


def is_private(items: Sequence[Item]) -> bool:
    """Return whether a compaction item stands for a conversation that must stay on the device."""
    return any(item["type"] == "compaction" and item["encrypted_content"].startswith(_PRIVATE) for item in items)


def compaction_of(items: Sequence[Item], *, private: bool = False) -> Item:
    """Return a compaction item that replaces only `items`, not everything before it. `private`: whether the
    conversation must stay on the device."""
    content = (_PRIVATE if private else _COMPACTED) + base64.b64encode(json_bytes(items)).decode()
    return {"type": "compaction", "id": item_id("compaction"), "encrypted_content": content}


def since_compaction(items: Sequence[Item]) -> list[Item]:
    """Replace all items up to the last compaction item by the items that it stands for. Raises InvalidRequestError."""
    at = max((index for index, item in enumerate(items) if item["type"] == "compaction"), default=None)
    if at is None:
        return list(items)
    param = f"input[{at}].encrypted_content"
    try:
        content = base64.b64decode(items[at]["encrypted_content"].rpartition(".")[2])
        held = items_of(_list_of_parts(json_of(content), param))
    except ValueError as error:
        raise invalid_value(param, "send the content of the compaction unchanged") from error
    if any(item["type"] == "item_reference" for item in held):
        raise invalid_value(param, "the content must hold whole items, not references")
    return since_compaction([*held, *items[at + 1 :]])


def with_own_ids(items: Sequence[Item]) -> list[Item]:
    """Give repeated items new ids, so that an id identifies one position in the list."""
    known: set[str] = set()
    own: list[Item] = []
    for item in items:
        own.append({**item, "id": item_id(item["type"])} if item["id"] in known else item)
        known.add(own[-1]["id"])
    return own


def _full(item: Item, param: str) -> Item:
    kind = str(item.get("type") or ("message" if "role" in item else "item_reference"))
    if kind == "item_reference":
        if not isinstance(item.get("id"), str):
            raise invalid_value(f"{param}.id", "a reference needs the id of an item")
        return {"type": kind, "id": item["id"]}
    if kind not in _PREFIXES and (text := text_of(item.get("content"))):
        item, kind = {"role": item.get("role", "user"), "content": text}, "message"
    if kind not in _PREFIXES:
        fault = f"{param}: items of type {kind[:100]!r} are not supported by this server: leave them out."
        raise UnsupportedFeatureError(fault, param=param)
    full = {"status": "completed", **item, "type": kind, "id": str(item.get("id") or item_id(kind))}
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise invalid_value(f"{param}.role", f"the role must be one of {', '.join(_ROLES)}")
        full["content"] = _parts(item, f"{param}.content")
    elif kind == "reasoning":
        full.setdefault("summary", [])
    elif kind != "compaction":
        if kind == "function_call":
            arguments: Any = item.get("arguments") or {}
            full["arguments"] = json_bytes(arguments).decode() if isinstance(arguments, dict) else arguments
        if kind in _CALL_FIELDS:
            full["call_id"] = item.get("call_id") or full["id"]
        for name in _CALL_FIELDS.get(kind, ("call_id",)):
            if not isinstance(full.get(name), str):
                raise invalid_value(f"{param}.{name}", "the value must be a string")
    return full


def _parts(message: Item, param: str) -> list[Item]:
    """Convert the content to typed parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return _list_of_parts(content, param)
    if message["role"] == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]


def _list_of_parts(value: Any, param: str) -> list[Item]:
    parts = tables(value)
    if parts is None or not all(parts):
        raise invalid_value(param, "the content must be a string or a list of parts")
    return parts


def messages_of(items: Sequence[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Convert items since the last compaction, joining reasoning, text and calls. Raises InvalidRequestError."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for index, item in enumerate(since_compaction(items)):
        kind, param = item["type"], f"input[{index}]"
        if kind == "reasoning":
            thoughts, sealed = _reasoning(item), blocks_of(item.get("encrypted_content"))
            given = {"reasoning_content": thoughts, "thinking_blocks": sealed}
            delta = {name: value for name, value in given.items() if value}
            if delta:
                _say(messages, delta, without=("content", "tool_calls") if thoughts else ())
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            _say(messages, {"tool_calls": [call]})
        elif kind == "custom_tool_call":
            custom = {"name": item["name"], "input": item["input"]}
            call = {"id": item["call_id"], "type": "custom", "custom": custom}
            _say(messages, {"tool_calls": [call]})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output, place = item.get("output"), f"{param}.output"
            content = output if isinstance(output, str) else _content(_list_of_parts(output, place), place)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif item["role"] == "assistant":
            _say(messages, {"content": _content(item["content"], param)}, without=("content", "tool_calls"))
        else:
            messages.append({"role": item["role"], "content": _content(item["content"], param)})
    made = [message_of(message["deltas"]) if "deltas" in message else message for message in messages]
    return [message for message in made if message["content"] is not None or "tool_calls" in message]


def _say(messages: list[dict[str, Any]], delta: dict[str, Any], without: Sequence[str] = ()) -> None:
    """Add a delta to the last message if it is the assistant's and has none of these fields; else to a new message."""
    deltas: list[dict[str, Any]] = messages[-1].get("deltas", []) if messages else []
    if not deltas or any(name in each for each in deltas for name in without):
        messages.append({"role": "assistant", "deltas": [delta]})
    else:
        deltas.append(delta)


def _reasoning(item: Item) -> str:
    """Return the text of reasoning, or else its summary."""
    parts = objects_of(item.get("content")) or objects_of(item.get("summary"))
    kinds = ("reasoning_text", "summary_text")
    return "".join(str(part.get("text", "")) for part in parts if part.get("type") in kinds)


def _content(parts: Sequence[Item], param: str) -> str | list[dict[str, Any]]:
    return content_of([_part(part, param) for part in parts])


def _part(part: Item, param: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text", "refusal"):
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(name), str):
            raise invalid_value(param, f"{name} must be a string")
        return {"type": name, name: part[name]}
    if kind == "input_image" and part.get("image_url") is not None:
        image = {"url": part["image_url"], "detail": part.get("detail")}
        return {"type": "image_url", "image_url": {name: value for name, value in image.items() if value is not None}}
    if kind == "input_file" and part.get("file_url") is None:
        file = {name: part[name] for name in ("file_data", "file_id", "filename") if part.get(name) is not None}
        return {"type": "file", "file": file}
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": part.get("input_audio")}
    raise UnsupportedFeatureError(
        f"{param}: parts of type {str(kind)[:100]!r} are not supported in this form. Supported: text, image URLs, file "
        "data and audio.",
        param=param,
    )
