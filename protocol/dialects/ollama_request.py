"""Ollama's requests: decoding, checks, and translation to chat requests.

A field or option without an equivalent in chat requests raises an error that names the field. `keep_alive` is accepted
and ignored, because the server's settings determine when a model is unloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec

from ..decoding import convert, prepare_types, unsupported
from ..errors import UnsupportedFeatureError, invalid_value
from ..http.lenient_json import object_of

#: Ollama's options and the equivalent fields of chat requests.
_OPTIONS = {
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_completion_tokens",
    **{
        name: name
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop", "presence_penalty",
                     "frequency_penalty")
    },
}  # fmt: skip
_AT_LOADING = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "low_vram", "numa")
#: Media types of images by the start of their Base64 text, which encodes the format's magic bytes.
_PICTURES = {"iVBOR": "image/png", "/9j/": "image/jpeg", "R0lG": "image/gif", "UklGR": "image/webp"}
_UNBOUNDED = (-1, -2)  # values of `num_predict` that mean no limit
R = TypeVar("R", bound="_ChatOptions")


class _ChatOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields common to chat and generate requests."""

    model: str
    stream: bool = True
    # Output format: "json", or a JSON schema.
    format: str | dict[str, Any] = ""
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    keep_alive: str | float | None = None
    # Whether to reason; a string such as "low" sets the reasoning effort.
    think: bool | str | None = None

    @property
    def turns(self) -> list[dict[str, Any]]:
        """Conversation in Ollama's format; empty to only load the model."""
        raise NotImplementedError


class OllamaChat(_ChatOptions, kw_only=True):
    """Request body of `POST /api/chat`."""

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])

    @property
    def turns(self) -> list[dict[str, Any]]:
        return self.messages


class OllamaGenerate(_ChatOptions, kw_only=True):
    """Request body of `POST /api/generate`, handled as a chat with one user message."""

    prompt: str = ""
    system: str = ""
    images: list[str] = msgspec.field(default_factory=list[str])

    @property
    def turns(self) -> list[dict[str, Any]]:
        if not self.prompt:
            return []
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt, "images": self.images}]


class OllamaEmbed(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Request body of `POST /api/embed`."""

    model: str
    input: str | list[str]
    dimensions: int | None = None
    keep_alive: str | float | None = None


class OllamaEmbedding(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Request body of `POST /api/embeddings`, the older endpoint."""

    model: str
    prompt: str
    keep_alive: str | float | None = None


class OllamaPull(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Request body of `POST /api/pull`."""

    model: str
    stream: bool = True
    # Must be false, because downloads always use TLS.
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.insecure:
            raise ValueError("insecure must be false: downloads always use TLS")

    @property
    def wanted(self) -> str:
        """Name of the model, in the form that `updraft pull` accepts."""
        name = model_name(self.model)
        return f"hf:{name.removeprefix('hf.co/')}" if name.startswith("hf.co/") else name


class OllamaShow(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Request body of `POST /api/show`."""

    model: str
    verbose: bool = False


prepare_types(OllamaChat, OllamaGenerate, OllamaEmbed, OllamaEmbedding, OllamaPull, OllamaShow)


def model_name(name: str) -> str:
    """Strip the default tag `:latest`, which Ollama's clients add to names without a tag."""
    return name.removesuffix(":latest")


def read_ollama_request(fields: Mapping[str, Any], kind: type[R]) -> R:
    """Check a decoded request. Raises InvalidRequestError or UnsupportedFeatureError."""
    request = convert(fields, kind)
    if isinstance(request, OllamaChat):
        # Restore the original values: `convert` drops nulls, which have meaning inside arguments and schemas.
        request.messages, request.tools = fields.get("messages") or [], fields.get("tools") or []
    return request


def chat_body(request: OllamaChat | OllamaGenerate) -> dict[str, Any]:
    """Translate to a chat request. Raises InvalidRequestError or UnsupportedFeatureError."""
    body: dict[str, Any] = {"model": model_name(request.model), "messages": _messages(request.turns)}
    body |= dict(_option(name, value) for name, value in request.options.items() if value is not None)
    if body.get("max_completion_tokens") in _UNBOUNDED:
        del body["max_completion_tokens"]
    if isinstance(request, OllamaChat) and request.tools:
        body["tools"] = request.tools
    if request.think in (False, "false"):
        body["reasoning_effort"] = "none"
    elif request.think not in (None, True, "true"):
        body["reasoning_effort"] = request.think
    if isinstance(request.format, dict):
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": request.format}}
    elif request.format == "json":
        body["response_format"] = {"type": "json_object"}
    elif request.format:
        raise invalid_value("format", 'must be "json" or a JSON schema')
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _option(name: str, value: Any) -> tuple[str, Any]:
    if name in _AT_LOADING:
        raise UnsupportedFeatureError(
            f"options.{name} cannot be changed per request: leave it out, and use the server's settings instead.",
            param=f"options.{name}",
        )
    if name not in _OPTIONS:
        raise unsupported(f"options.{name[:100]}")
    return _OPTIONS[name], value


def _messages(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages. Ollama's tool calls have no ids, so results are matched by tool name, else in order."""
    messages: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []  # calls without a result
    for index, turn in enumerate(turns):
        param = f"messages[{index}]"
        message: dict[str, Any] = {"role": turn.get("role"), "content": _content(turn, param)}
        if isinstance(turn.get("thinking"), str):
            message["reasoning_content"] = turn["thinking"]
        if calls := turn.get("tool_calls"):
            if not isinstance(calls, list):
                raise invalid_value(f"{param}.tool_calls", "must be a list")
            waiting = [
                _call(call, f"call_{index}_{number}", param) for number, call in enumerate(cast("list[Any]", calls))
            ]
            message["tool_calls"] = list(waiting)
        if turn.get("role") == "tool":
            message["tool_call_id"] = _answered(turn, waiting, param)
        messages.append(message)
    return messages


def _call(given: Any, call_id: str, param: str) -> dict[str, Any]:
    call = object_of(given)
    function = object_of(call.get("function"))
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise invalid_value(f"{param}.tool_calls", "each call needs a function with a name and arguments as an object")
    called = {"name": name, "arguments": msgspec.json.encode(arguments).decode()}
    return {"id": call.get("id") or call_id, "type": "function", "function": called}


def _answered(turn: dict[str, Any], waiting: list[dict[str, Any]], param: str) -> str:
    """Return the id of the call that a tool result answers, and remove the call from `waiting`."""
    call_id, name = turn.get("tool_call_id"), turn.get("tool_name") or turn.get("name")
    named = (call for call in waiting if call["id"] == call_id or call["function"]["name"] == name)
    answered = next(named, waiting[0] if waiting else None)
    if answered is None:
        raise invalid_value(param, "the tool result answers no call of an earlier assistant message")
    waiting.remove(answered)
    return answered["id"]


def _content(turn: dict[str, Any], param: str) -> str | list[dict[str, Any]]:
    text: Any = turn.get("content") or ""
    pictures: Any = turn.get("images") or []
    if not isinstance(text, str) or not isinstance(pictures, list):
        raise invalid_value(param, "content must be a string, and images a list")
    if not pictures:
        return text
    shown = [
        {"type": "image_url", "image_url": {"url": _data_url(picture, f"{param}.images[{index}]")}}
        for index, picture in enumerate(cast("list[Any]", pictures))
    ]
    return [{"type": "text", "text": text}, *shown]


def _data_url(picture: Any, param: str) -> str:
    for beginning, media_type in _PICTURES.items():
        if isinstance(picture, str) and picture.startswith(beginning):
            return f"data:{media_type};base64,{picture}"
    raise invalid_value(param, "must be a PNG, JPEG, GIF or WebP image in Base64")
