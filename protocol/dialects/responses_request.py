"""OpenAI's Responses requests as chat requests. A field without an equivalent raises an error that names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ..decoding import convert, prepare_types, unsupported
from ..errors import invalid_value
from ..hints import METADATA_LIMITS, Hints, metadata_notes, object_of
from ..http.lenient_json import objects_of
from ..requests import StreamOptions
from ..structured import TOOL_HINTS, no_such_tool, tool_notes
from .responses_items import Item, is_vendor_item, messages_of

LOGPROBS = "message.output_text.logprobs"
#: Accepted values of `include`. Only LOGPROBS has an effect, because built-in tools are refused.
_INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
)
#: Fields with the same name in chat requests.
_SAME = (
    "model", "temperature", "top_p", "top_k", "parallel_tool_calls", "presence_penalty", "frequency_penalty", "updraft",
)  # fmt: skip
#: Values of options of `reasoning` that need no note. Reasoning is always returned in full, not summarized.
_USUAL = (None, "auto", "standard")


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "text"})
    verbosity: str | None = None


class ResponsesRequest(Hints, forbid_unknown_fields=True, kw_only=True):
    """Request body of `POST /v1/responses`."""

    model: str = "auto"
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    # Stored conversation, by ID or as an object with an `id`, which the input and the answer are added to.
    conversation: str | dict[str, Any] | None = None
    stream: bool = False
    # Have no effect: events always report usage and are not padded.
    stream_options: StreamOptions | None = None
    # Whether to store the response; None: the server's setting.
    store: bool | None = None
    background: bool = False
    # Whether to answer. False only makes the input known to the next request of a WebSocket.
    generate: bool = True
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool | None = None
    text: TextOptions = msgspec.field(default_factory=TextOptions)
    # Accepted but without effect, because a conversation that is too long is always an error.
    truncation: Literal["auto", "disabled"] = "disabled"
    # Updraft's router options.
    updraft: dict[str, Any] | None = None

    @property
    def conversation_id(self) -> str | None:
        return str(self.conversation.get("id")) if isinstance(self.conversation, dict) else self.conversation

    @property
    def compact_threshold(self) -> int | None:
        """Number of prompt tokens from which the conversation is compacted. None: never. Other entries than those of
        type `compaction` are hints."""
        entries = [each for each in objects_of(self.context_management) if each.get("type") == "compaction"]
        threshold = entries[0].get("compact_threshold") if entries else None
        return threshold if isinstance(threshold, int) and threshold > 0 else None

    @property
    def names(self) -> dict[str, str]:
        """The caller's names of the chat request's fields, for errors and notes."""
        limit = dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens")
        named = {"reasoning_effort": self.effort[1] or "reasoning.effort", "verbosity": "text.verbosity"}
        return {**named, **limit, "response_format": "text.format"}

    @property
    def hints(self) -> tuple[str, ...]:
        """Notes on the parts of the request that have no effect."""
        used = ("metadata",) if self.compact_threshold is None else ("metadata", "context_management")
        notes = [*self.dropped(*used), *metadata_notes(self.metadata)]
        options = object_of(self.reasoning).items()
        notes += [f"reasoning.{name}: no effect" for name, value in options if name != "effort" and value not in _USUAL]
        notes += tool_notes(self.tools)
        items = self.input if isinstance(self.input, list) else ()
        kinds = ((index, str(item.get("type"))[:100]) for index, item in enumerate(items) if is_vendor_item(item))
        return (*notes, *(f"input[{index}]: left out, {kind} items belong to a vendor's tool" for index, kind in kinds))


prepare_types(ResponsesRequest)


def read_responses_request(fields: Mapping[str, Any]) -> ResponsesRequest:
    """Check a decoded request. Raises InvalidRequestError or UnsupportedFeatureError."""
    request = convert(fields, ResponsesRequest)
    request.metadata = fields.get("metadata")  # with its nulls, for the note
    if request.stream_options is not None and not request.stream:
        raise invalid_value("stream_options", "needs stream=true")
    for name in request.include or ():
        if name not in _INCLUDABLE:
            raise invalid_value("include", f"supported values are {', '.join(_INCLUDABLE)}, got {name[:100]!r}")
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise invalid_value("max_output_tokens", f"the limit must be at least 1, got {request.max_output_tokens}")
    return request


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Check the metadata of an object to store against OpenAI's limits. Raises InvalidRequestError."""
    if metadata_notes(metadata):
        raise invalid_value("metadata", METADATA_LIMITS)


def chat_body(request: ResponsesRequest, items: Sequence[Item]) -> dict[str, Any]:
    """Translate the request, with `items` as the conversation, to a chat request. Raises InvalidRequestError."""
    body = request.kept(*_SAME)
    body["messages"] = messages_of(items, request.instructions)
    if request.max_output_tokens is not None:
        body["max_completion_tokens"] = request.max_output_tokens
    if request.top_logprobs is not None or LOGPROBS in (request.include or ()):
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if (effort := request.effort[0]) is not None:
        body["reasoning_effort"] = effort
    if request.text.verbosity is not None:
        body["verbosity"] = request.text.verbosity
    if (response_format := _response_format(request.text.format)) is not None:
        body["response_format"] = response_format
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    tools = [_function(tool, index) for index, tool in enumerate(request.tools) if tool.get("type") == "function"]
    if tools:
        body["tools"] = tools
    elif request.tool_choice == "required":
        raise invalid_value("tool_choice", "there are no functions to choose from: give tools of type function")
    else:
        body.pop("parallel_tool_calls", None)
    if tools or request.tool_choice not in ("auto", "none"):
        body["tool_choice"] = _tool_choice(request.tool_choice)
    return body


def prompt_body(request: ResponsesRequest, items: Sequence[Item]) -> dict[str, Any]:
    """Return the fields of `chat_body` that determine the prompt."""
    body = chat_body(request, items)
    return {name: body[name] for name in ("model", "messages", "tools", "tool_choice") if name in body}


def _response_format(wanted: dict[str, Any]) -> dict[str, Any] | None:
    kind = wanted.get("type")
    if kind == "json_schema":
        return {"type": kind, "json_schema": {name: value for name, value in wanted.items() if name != "type"}}
    return None if kind == "text" else wanted


def _function(tool: dict[str, Any], index: int) -> dict[str, Any]:
    function = {name: value for name, value in tool.items() if name not in ("type", *TOOL_HINTS)}
    for name in function:
        if name not in ("name", "description", "parameters", "strict"):
            raise unsupported(f"tools[{index}].{name}")
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        given = objects_of(choice.get("tools"))
        functions = [each for each in given if each.get("type") == "function"]
        named = [_tool_choice(each) for each in functions or given]
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    raise no_such_tool(kind)
