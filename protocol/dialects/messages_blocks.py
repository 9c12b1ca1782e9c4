"""Translation of Anthropic's content blocks to chat messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from ..errors import UnsupportedFeatureError, invalid_value
from ..http.lenient_json import object_of
from .chat_chunks import content_of
from .pieces import message_of

Block = dict[str, Any]
#: Types of content blocks that belong to tools run by a vendor's servers, such as Anthropic's web search.
_VENDOR = re.compile(r"server_tool_use|mcp_tool_use|\w+_tool_result|container_upload|tool_reference|compaction")


def is_vendor_block(block: Block) -> bool:
    """Return whether a block belongs to a tool run by a vendor's servers. Translations leave such blocks out."""
    return _VENDOR.fullmatch(str(block.get("type"))) is not None


def messages_of(messages: Sequence[Block], system: str | list[Block] | None) -> list[Block]:
    """Convert the conversation to chat messages. Raises InvalidRequestError or UnsupportedFeatureError."""
    chat: list[Block] = []
    if system:
        chat.append({"role": "system", "content": _content(_blocks(system, "system"), "system")})
    for index, message in enumerate(messages):
        param = f"messages[{index}]"
        role, blocks = message.get("role"), _blocks(message.get("content"), f"{param}.content")
        if role == "assistant":
            chat.append(_assistant(blocks, f"{param}.content"))
        elif role == "user":
            chat += _user(blocks, f"{param}.content")
        elif role == "system":
            chat.append({"role": role, "content": _content(blocks, f"{param}.content")})
        else:
            raise invalid_value(f"{param}.role", "the role must be user, assistant or system")
    return chat


def _blocks(content: Any, param: str) -> list[Block]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in cast("list[Any]", content)):
        raise invalid_value(param, "the content must be a string or a list of content blocks")
    return cast("list[Block]", content)


def _user(blocks: list[Block], param: str) -> list[Block]:
    """Convert a user turn. Tool results become separate messages before the other content of the turn."""
    results = [_result(block, f"{param}[{index}]") for index, block in enumerate(blocks) if _is_result(block)]
    rest = [block for block in blocks if not _is_result(block)]
    return [*results, {"role": "user", "content": _content(rest, param)}] if rest or not results else results


def _is_result(block: Block) -> bool:
    return block.get("type") == "tool_result"


def _result(block: Block, param: str) -> Block:
    """Convert a tool result. Chat messages have no error flag, so the text of a failed tool starts with "Error:"."""
    content = _content(_blocks(block.get("content") or "", f"{param}.content"), f"{param}.content")
    if block.get("is_error") is True:
        content = f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error:"}, *content]
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _assistant(blocks: list[Block], param: str) -> Block:
    deltas: list[Block] = []
    for index, block in enumerate(blocks):
        kind, place = block.get("type"), f"{param}[{index}]"
        signed = {"thinking_blocks": [block]}  # readable only for Anthropic
        if kind == "text":
            is_end = index + 1 < len(blocks) and blocks[index + 1].get("type") == "text"
            ended = {"citations": cited or list[Block]()} if (cited := block.get("citations")) or is_end else {}
            deltas.append({"content": _text(block, kind, place), **ended})
        elif kind == "thinking":
            thought = {"reasoning_content": _text(block, kind, place)}
            deltas.append(thought | (signed if block.get("signature") else {}))
        elif kind == "redacted_thinking":
            deltas.append(signed)
        elif kind == "tool_use":
            deltas.append({"tool_calls": [_call(block, place)]})
        elif not is_vendor_block(block):
            raise _foreign(kind, place)
    said = message_of(deltas)
    return {**said, "content": said["content"] or (None if "tool_calls" in said else "")}


def _call(block: Block, param: str) -> Block:
    given = block.get("input")
    arguments = given if given is None or isinstance(given, str) else msgspec.json.encode(given).decode()
    function = {"name": _text(block, "name", param), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _content(blocks: Sequence[Block], param: str) -> str | list[Block]:
    shown = [(index, block) for index, block in enumerate(blocks) if not is_vendor_block(block)]
    return content_of([_part(block, f"{param}[{index}]") for index, block in shown])


def _part(block: Block, param: str) -> Block:
    kind = block.get("type")
    if kind == "text":
        return {"type": kind, "text": _text(block, "text", param)}
    source = object_of(block.get("source"))
    shape = (kind, source.get("type"))
    if shape == ("image", "url"):
        return {"type": "image_url", "image_url": {"url": _text(source, "url", f"{param}.source")}}
    if shape == ("image", "base64"):
        return {"type": "image_url", "image_url": {"url": _data_url(source, f"{param}.source")}}
    if shape == ("document", "text"):
        heading = [text for text in (block.get("title"), block.get("context")) if isinstance(text, str)]
        return {"type": "text", "text": "\n".join([*heading, _text(source, "data", f"{param}.source")])}
    if shape == ("document", "base64"):
        name = block.get("title") or "document.pdf"
        return {"type": "file", "file": {"filename": name, "file_data": _data_url(source, f"{param}.source")}}
    raise _foreign(kind, param)


def _data_url(source: Block, param: str) -> str:
    return f"data:{_text(source, 'media_type', param)};base64,{_text(source, 'data', param)}"


def _text(block: Block, name: str, param: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid_value(f"{param}.{name}", "the value must be a string")
    return value


def _foreign(kind: Any, param: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"{param}: content blocks of type {str(kind)[:100]!r} are not supported in this form. Supported: text, images, "
        "documents with inline data, tool_use and tool_result.",
        param=param,
    )
