"""Ollama's requests: decoding, checks, and translation to chat requests or, without a chat template, completions.

Options without an equivalent are hints, with a note. `keep_alive` gets no note, because every client sends it: the
server's settings determine when a model is unloaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ..decoding import convert, prepare_types
from ..errors import UnsupportedFeatureError, invalid_value
from ..hints import Hints
from ..http.lenient_json import object_of, rows
from ..turns import whole_turns
from .chat_chunks import blocks_of

#: Ollama's options and the equivalent fields of chat requests.
_OPTIONS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_completion_tokens",
}
#: Media types of images by the start of their Base64 text, which encodes the format's magic bytes.
_PICTURES = {"iVBOR": "image/png", "/9j/": "image/jpeg", "R0lG": "image/gif", "UklGR": "image/webp"}
_PROMPT_TOKENS = 1024  # limit of the answer to a bare prompt without `num_predict`, since completions default to 16
_MAX_TEMPLATE = 20_000  # characters
_ACTION = re.compile(r"\{\{([^{}]*)\}\}")
R = TypeVar("R", bound=msgspec.Struct)


class _ModelRequest(Hints, forbid_unknown_fields=True, kw_only=True):
    """Fields common to all requests that run a model."""

    model: str
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    keep_alive: str | float | None = None
    truncate: bool | None = None

    @property
    def hints(self) -> tuple[str, ...]:
        """Notes on the parts of the request that have no effect."""
        used = _OPTIONS if isinstance(self, _ChatOptions) else {}
        options = [f"options.{name[:100]}" for name in self.options if name not in used]
        idle = ["truncate", "shift"] if isinstance(self, _ChatOptions) else []
        if isinstance(self, OllamaGenerate) and self.is_bare:
            idle += ["system", "template"] if self.raw else [] if self.template else ["system"]
        fields = [name for name in idle if getattr(self, name)]
        return (*(f"{name}: no effect" for name in (*options, *fields)), *self.dropped())

    @property
    def names(self) -> dict[str, str]:
        """The caller's names of the fields of chat requests and completions, for errors and notes."""
        named = {field: f"options.{name}" for name, field in _OPTIONS.items()}
        more = {"reasoning_effort": "think", "response_format": "format", "json_schema": "format"}
        return {**named, **more, "max_tokens": "options.num_predict"}


class _ChatOptions(_ModelRequest, kw_only=True):
    """Fields common to chat and generate requests."""

    stream: bool = True
    # Output format: "json", or a JSON schema.
    format: str | dict[str, Any] = ""
    logprobs: bool = False
    top_logprobs: int | None = None
    shift: bool = False


class OllamaChat(_ChatOptions, kw_only=True):
    """Request body of `POST /api/chat`."""

    # Conversation; empty to only load the model.
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])


class OllamaGenerate(_ChatOptions, kw_only=True):
    """Request body of `POST /api/generate`: a chat with one user message, or a bare prompt (`is_bare`)."""

    prompt: str = ""
    system: str = ""
    images: list[str] = msgspec.field(default_factory=list[str])
    # Whether `prompt` is complete, without a chat template.
    raw: bool = False
    # Text after the answer, for models that fill in the middle.
    suffix: str = ""
    # Template to use instead of the model's chat template.
    template: str = ""
    # Conversation so far. Must be empty, because this server returns none.
    context: list[int] = msgspec.field(default_factory=list[int])

    def __post_init__(self) -> None:
        if self.context:
            raise ValueError("context must be empty: send the conversation to /api/chat")

    @property
    def messages(self) -> list[dict[str, Any]]:
        if not (self.prompt or self.suffix):
            return []
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt, "images": self.images}]

    @property
    def is_bare(self) -> bool:
        """Return whether the prompt is completed without the model's chat template."""
        return bool(self.suffix or (self.prompt and (self.raw or self.template)))


class OllamaEmbed(_ModelRequest, kw_only=True):
    """Request body of `POST /api/embed`."""

    input: str | list[str]
    dimensions: int | None = None


class OllamaEmbedding(_ModelRequest, kw_only=True):
    """Request body of `POST /api/embeddings`, the older endpoint."""

    prompt: str


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


def read_ollama_request(fields: dict[str, Any], kind: type[R]) -> R:
    """Check a decoded request. `name` is an older name of `model`. Raises InvalidRequestError."""
    fields = {"model": fields.get("name"), **fields}
    fields.pop("name", None)
    request = convert(fields, kind)
    if isinstance(request, OllamaChat):
        # Restore the original values: `convert` drops nulls, which have meaning inside arguments and schemas.
        request.messages, request.tools = fields.get("messages") or [], fields.get("tools") or []
    return request


def chat_body(request: OllamaChat | OllamaGenerate) -> dict[str, Any]:
    """Translate to a chat request, or to a text completion if the prompt is bare. Raises InvalidRequestError."""
    body: dict[str, Any] = {"model": model_name(request.model), **_options(request), **request.kept()}
    if (effort := request.effort[0]) is not None:
        body["reasoning_effort"] = effort
    if request.format not in ("", "json") and not isinstance(request.format, dict):
        raise invalid_value("format", 'the format must be "json" or a JSON schema')
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if isinstance(request, OllamaGenerate) and request.is_bare:
        return _prompt_body(request, body)
    body["messages"] = _messages(request.messages)
    if isinstance(request, OllamaChat) and request.tools:
        body["tools"] = request.tools
    if request.logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    if isinstance(request.format, dict):
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": request.format}}
    elif request.format:
        body["response_format"] = {"type": "json_object"}
    return body


def _prompt_body(request: OllamaGenerate, body: dict[str, Any]) -> dict[str, Any]:
    for name in ("images", "logprobs"):
        if getattr(request, name):
            raise UnsupportedFeatureError(f"{name} cannot be combined with raw, suffix or template.", param=name)
    body.pop("reasoning_effort", None)
    body |= {"prompt": request.prompt, "max_tokens": body.pop("max_completion_tokens", _PROMPT_TOKENS)}
    if request.template and not request.raw:
        values = {"System": request.system, "Prompt": request.prompt, "Suffix": request.suffix}
        if request.suffix and ".Suffix" not in request.template:
            raise UnsupportedFeatureError("suffix needs a template with .Suffix: leave one out.", param="suffix")
        body["prompt"] = _filled(request.template, values)
    elif request.suffix:
        body["suffix"] = request.suffix
    if request.format:
        body["json_schema"] = {"type": "object"} if request.format == "json" else request.format
    return body


def _options(request: _ChatOptions) -> dict[str, Any]:
    """Return the options that chat requests have, by the names of chat requests. `num_predict` below 1 is no limit."""
    given = {_OPTIONS[name]: value for name, value in request.options.items() if name in _OPTIONS and value is not None}
    limit = given.get("max_completion_tokens")
    if isinstance(limit, int | float) and limit < 1:
        del given["max_completion_tokens"]
    return given


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Evaluate a template. Return its text before the answer. Raises UnsupportedFeatureError."""
    pieces, shown = list[str](), [True]
    for index, piece in enumerate(_ACTION.split(template) if len(template) <= _MAX_TEMPLATE else ("", "too long")):
        match piece.strip("- \t\r\n").split():
            case _ if index % 2 == 0:
                pieces.append(piece if all(shown) else "")
            case ["if", name] if name[1:] in values:
                shown.append(bool(values[name[1:]]))
            case ["else"] if len(shown) > 1:
                shown[-1] = not shown[-1]
            case ["end"] if len(shown) > 1:
                shown.pop()
            case [".Response"]:
                break
            case [name] if name[1:] in values:
                pieces.append(values[name[1:]] if all(shown) else "")
            case _:
                raise UnsupportedFeatureError(
                    "template: only .System, .Prompt, .Suffix, .Response, if, else and end are supported, in up to "
                    f"{_MAX_TEMPLATE} characters. Fill in the template yourself, and send the prompt with raw: true.",
                    param="template",
                )
    return "".join(pieces)


def _messages(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages. Ollama's tool calls have no ids, so results are matched by tool name, else in order."""
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        message: dict[str, Any] = {"role": turn.get("role"), "content": _content(turn, f"messages[{index}]")}
        if isinstance(turn.get("thinking"), str):
            message["reasoning_content"] = turn["thinking"]
        if sealed := blocks_of(turn.get("thinking_signature")):
            message["thinking_blocks"] = sealed
        if calls := turn.get("tool_calls"):
            message["tool_calls"] = calls if (given := rows(calls)) is None else [_call(call) for call in given]
        kept = ("tool_call_id", "tool_name", "name")
        messages.append(message | {name: turn[name] for name in kept if turn.get(name) is not None})
    return [
        {name: value for name, value in message.items() if name not in ("tool_name", "name")}
        for message in whole_turns({"messages": messages})["messages"]
    ]


def _call(call: Any) -> Any:
    """Return a tool call without Ollama's own fields, such as the function's `index`. Malformed calls stay."""
    function = object_of(object_of(call).get("function"))
    kept = {name: value for name, value in function.items() if name in ("name", "arguments")}
    return {"type": "function", **call, "function": kept} if function else call


def _content(turn: dict[str, Any], param: str) -> str | list[dict[str, Any]]:
    text: Any = turn.get("content") or ""
    pictures = rows(turn.get("images") or [])
    if not isinstance(text, str) or pictures is None:
        raise invalid_value(param, "content must be a string, and images a list")
    if not pictures:
        return text
    urls = [_data_url(picture, f"{param}.images[{index}]") for index, picture in enumerate(pictures)]
    return [{"type": "text", "text": text}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]


def _data_url(picture: Any, param: str) -> str:
    for beginning, media_type in _PICTURES.items():
        if isinstance(picture, str) and picture.startswith(beginning):
            return f"data:{media_type};base64,{picture}"
    raise invalid_value(param, "the image must be a PNG, JPEG, GIF or WebP file in Base64")
