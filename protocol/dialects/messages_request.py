"""Anthropic's Messages requests as chat requests. Fields without an equivalent are errors, unless they are hints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ..decoding import convert, prepare_types, read_object, unsupported
from ..errors import UnsupportedFeatureError, invalid_value
from ..hints import Hints
from ..http.lenient_json import object_of, objects_of, tables
from ..structured import TOOL_HINTS, tool_notes
from .chat_chunks import content_of, message_of, text_of

Block = dict[str, Any]
_KNOWN = ("text", "thinking", "redacted_thinking", "compaction", "tool_use", "tool_result", "image", "document")
#: Types of blocks whose text only a vendor's servers can use, such as results of Anthropic's web search.
_VENDOR = re.compile(r"\w+_tool_result")
_MEDIA = re.compile(r"image|audio|video|file")  # in types of blocks that hold content other than text
#: Fields with the same name in chat requests.
_SAME = ("model", "temperature", "top_p", "top_k", "updraft")
_TOOL_FIELDS = ("type", "name", "description", "input_schema", "strict", *TOOL_HINTS)
_FUNCTIONS = (None, "custom")  # types of tools that a model calls
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def is_vendor_block(block: Block) -> bool:
    """Return whether a block belongs to a tool or feature of a vendor's servers, so that translations leave it out.
    Blocks of unknown types count as such if they hold neither text nor media."""
    kind = block.get("type")
    if not isinstance(kind, str) or kind in _KNOWN:
        return False
    return bool(_VENDOR.fullmatch(kind)) or not (text_of(block.get("content")) or _MEDIA.search(kind))


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
    if (blocks := tables(content)) is None:
        raise invalid_value(param, "the content must be a string or a list of content blocks")
    return blocks


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
        elif kind in ("redacted_thinking", "compaction"):
            deltas.append(signed)
        elif kind == "tool_use":
            deltas.append({"tool_calls": [_call(block, place)]})
        elif not is_vendor_block(block):
            if (part := _part(block, place))["type"] != "text":
                raise _foreign(kind, place)
            deltas.append({"content": part["text"]})
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
    heading = [text for name in ("title", "context", "source") if isinstance(text := block.get(name), str)]
    if shape == ("document", "text"):
        return {"type": "text", "text": "\n".join([*heading, _text(source, "data", f"{param}.source")])}
    if kind not in _KNOWN and (text := text_of(block.get("content"))):
        return {"type": "text", "text": "\n".join([*heading, text])}
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


class MessagesToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class MessagesRequest(Hints, forbid_unknown_fields=True, kw_only=True):
    """Request body of `POST /v1/messages`."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] = msgspec.field(default_factory=list[str])
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    tool_choice: MessagesToolChoice | None = None
    # Updraft's router options.
    updraft: dict[str, Any] | None = None

    @property
    def names(self) -> dict[str, str]:
        """The caller's names of the chat request's fields, for errors and notes."""
        named = {"reasoning_effort": self.effort[1] or "thinking", "user": "metadata" if self.user is None else "user"}
        parallel = {"parallel_tool_calls": "tool_choice.disable_parallel_tool_use"}
        return {**named, **parallel, "max_completion_tokens": "max_tokens", "stop": "stop_sequences"}

    @property
    def hints(self) -> tuple[str, ...]:
        """Notes on the parts of the request that have no effect."""
        notes = self.dropped("metadata")
        if object_of(self.thinking).get("display") not in (None, "summarized"):
            notes.append("thinking.display: no effect, reasoning is returned in full")
        notes += tool_notes(self.tools, _FUNCTIONS)
        for at, message in enumerate(self.messages):
            for index, block in enumerate(objects_of(message.get("content"))):
                if is_vendor_block(block):
                    kind = str(block.get("type"))[:100]
                    notes.append(f"messages[{at}].content[{index}]: left out, {kind} blocks belong to a vendor's tool")
        return tuple(notes)


prepare_types(MessagesRequest)


def read_messages_request(fields: Mapping[str, Any]) -> MessagesRequest:
    """Check a decoded request. Raises InvalidRequestError or UnsupportedFeatureError."""
    request = convert(fields, MessagesRequest)
    # Restore the original values, because `convert` drops nulls, which have meaning inside arguments and schemas.
    request.messages, request.tools = fields["messages"], fields.get("tools") or []
    if request.max_tokens < 1:
        raise invalid_value("max_tokens", f"the limit must be at least 1, got {request.max_tokens}")
    if not request.messages:
        raise invalid_value("messages", "the list must hold at least one message")
    return request


def read_message(body: bytes) -> tuple[MessagesRequest, bytes]:
    """Parse a request. Return it with the body of the equivalent chat request. Raises InvalidRequestError."""
    asked = read_messages_request(read_object(body, exact="input"))
    return asked, msgspec.json.encode(chat_body(asked))


def read_count(body: bytes) -> bytes:
    """Translate a request to count tokens to the chat request that it describes. Raises InvalidRequestError."""
    asked = read_messages_request({**read_object(body), "max_tokens": 1, "stream": False})
    return msgspec.json.encode(chat_body(asked))


def chat_body(request: MessagesRequest) -> dict[str, Any]:
    """Translate to a chat request. Raises InvalidRequestError or UnsupportedFeatureError."""
    body = request.kept(*_SAME)
    body |= {"messages": messages_of(request.messages, request.system), "max_completion_tokens": request.max_tokens}
    last: Block = body["messages"][-1]
    if last["role"] == "assistant" and "tool_calls" not in last:  # the answer is prefilled, so continue it
        body |= {"add_generation_prompt": False, "continue_final_message": True}
    if request.stop_sequences:
        body["stop"] = request.stop_sequences
    if (user := object_of(request.metadata).get("user_id")) is not None:
        body.setdefault("user", user)
    if body.get("service_tier") == "standard_only":
        body["service_tier"] = "default"
    elif body.get("service_tier") == "auto":
        del body["service_tier"]
    if (effort := _effort(request)) is not None:
        body["reasoning_effort"] = effort
    if (wanted := object_of(request.output_config).get("format")) is not None:
        body["response_format"] = _response_format(wanted)
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body | _tools(request)


def _tools(request: MessagesRequest) -> dict[str, Any]:
    choice = request.tool_choice
    tools = [_function(tool, f"tools[{index}]") for index, tool in enumerate(request.tools) if _is_function(tool)]
    if not tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise invalid_value("tool_choice", "there are no tools to choose from: give tools")
        return {}
    fields: dict[str, Any] = {"tools": tools}
    if choice is None:
        return fields
    if (choice.type == "tool") != (choice.name is not None):
        raise invalid_value("tool_choice.name", 'a name is required for type "tool" and not allowed otherwise')
    if any(tool.get("name") == choice.name for tool in request.tools if choice.name and not _is_function(tool)):
        raise UnsupportedFeatureError("tool_choice names a tool that no model here can call.", param="tool_choice")
    named = {"type": "function", "function": {"name": choice.name}}
    fields["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _is_function(tool: dict[str, Any]) -> bool:
    return tool.get("type") in _FUNCTIONS


def _function(fields: dict[str, Any], param: str) -> dict[str, Any]:
    for name in fields:
        if name not in _TOOL_FIELDS:
            raise unsupported(f"{param}.{name[:100]}")
    if not isinstance(fields.get("name"), str) or not isinstance(fields.get("input_schema"), dict):
        raise invalid_value(param, "a tool needs a name and an input_schema")
    function = {"name": fields["name"], "description": fields.get("description"), "parameters": fields["input_schema"]}
    function["strict"] = fields.get("strict")
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _effort(request: MessagesRequest) -> str | None:
    """Return the reasoning effort; None if the model decides how much to reason, as without a budget."""
    (effort, field), mode = request.effort, object_of(request.thinking).get("type")
    if mode == "disabled":
        return "none"
    return None if field == "thinking" and mode != "enabled" else effort


def _response_format(format_: Any) -> dict[str, Any]:
    wanted = object_of(format_)
    if wanted.get("type") != "json_schema" or set(wanted) != {"type", "schema"}:
        raise invalid_value("output_config.format", 'the format must be {"type": "json_schema", "schema": ...}')
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted["schema"], "strict": True}}
