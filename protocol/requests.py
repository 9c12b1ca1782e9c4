"""What a client may ask: OpenAI's chat and text completion requests, decoded and checked.

Unknown fields are refused. Fields of the OpenAI surface that no engine of ours implements yet are accepted only at the
value that changes nothing; anything else is an `UnsupportedFeatureError` naming the field.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from .errors import InvalidRequestError, UnsupportedFeatureError
from .prompts import Prompt, WirePrompts, prompts_of
from .sampling import SamplingParams

MAX_PROMPTS = 128  # of one completion request


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    type: Literal["text"] = "text"


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn. `content` may be a string or a list of text parts; other part types are refused."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's predicted output: here, the local answer going up as the draft to verify."""

    content: str | list[TextPart]
    type: Literal["content"] = "content"

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class ResponseFormat(msgspec.Struct):
    type: str


class UpdraftOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Per-request router options (`extra_body={"updraft": {...}}`); engines refuse them, the router consumes them.

    `quality`: share of the cloud's quality to keep, in (0, 1]. `private`: never leave the device.
    `hold_tokens`: stream after this many local tokens instead of after the whole local answer was judged.
    """

    quality: float | None = None
    private: bool = False
    hold_tokens: int | None = None


class _Shared(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`priority` (lower goes first) and `cache_salt` (who shares cached prefixes) are for the cloud alone."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    updraft: UpdraftOptions | None = None


class ChatRequest(_Shared, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prediction: Prediction | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def sampling(self) -> SamplingParams:
        if self.logprobs is not True and self.top_logprobs is not None:
            raise InvalidRequestError("top_logprobs needs logprobs=true.", param="top_logprobs", code="invalid_value")
        wanted = (self.top_logprobs or 0) if self.logprobs else None
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return _sampling(self, limit, wanted)


class CompletionRequest(_Shared, kw_only=True):
    """`POST /v1/completions`: raw text or tokens in, raw text out, no chat template."""

    prompt: WirePrompts
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """Raises InvalidRequestError."""
        return prompts_of(self.prompt, "prompt", at_most=MAX_PROMPTS)

    def sampling(self) -> SamplingParams:
        return _sampling(self, self.max_tokens if self.max_tokens is not None else 16, self.logprobs)


R = TypeVar("R")


def parse_chat(body: bytes) -> ChatRequest:
    """Decode and check a chat request. Raises InvalidRequestError or UnsupportedFeatureError, never anything else."""
    request = decode(body, ChatRequest)
    if not request.messages:
        raise InvalidRequestError("messages must hold at least one message.", param="messages", code="invalid_value")
    if request.continue_final_message:
        if request.messages[-1].role != "assistant":
            raise InvalidRequestError(
                "continue_final_message needs the last message to be from the assistant.",
                param="continue_final_message",
            )
        if request.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other: set add_generation_prompt=false.",
                param="continue_final_message",
            )
    _refuse(request, "tools", "tool_choice", "parallel_tool_calls")
    _refuse_unless(request.response_format is None or request.response_format.type == "text", "response_format")
    _refuse_unless(request.modalities in (None, ["text"]), "modalities")
    _check_shared(request)
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Decode and check a text completion request. Raises InvalidRequestError or UnsupportedFeatureError."""
    request = decode(body, CompletionRequest)
    _refuse_unless(request.best_of in (None, 1), "best_of")
    _refuse_unless(not request.echo, "echo")
    _refuse(request, "suffix")
    prompts_of(request.prompt, "prompt", at_most=MAX_PROMPTS)
    _check_shared(request)
    return request


def decode(body: bytes, kind: type[R]) -> R:
    """JSON as a struct. Raises InvalidRequestError naming the field that does not fit."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(
            f"Invalid request: {error}", param=_param_of(str(error)), code="invalid_value"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}", code="invalid_json") from error


def _param_of(message: str) -> str | None:
    """The field a msgspec message is about: from ``- at `$.messages[0].role` `` or ``unknown field `x` ``."""
    for opening in ("at `$.", "field `"):
        _, found, rest = message.partition(opening)
        if found:
            return rest.partition("`")[0]
    return None


def _check_shared(request: ChatRequest | CompletionRequest) -> None:
    if request.n is not None and request.n < 1:
        raise InvalidRequestError(f"n must be at least 1, got {request.n}.", param="n", code="invalid_value")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream=true.", param="stream_options", code="invalid_value")
    if request.updraft is not None and request.updraft.quality is not None and not 0 < request.updraft.quality <= 1:
        raise InvalidRequestError("updraft.quality must be above 0 and at most 1.", param="updraft.quality")
    request.sampling()


def _refuse(request: msgspec.Struct, *fields: str) -> None:
    for field in fields:
        _refuse_unless(getattr(request, field) is None, field)


def _refuse_unless(neutral: bool, field: str) -> None:
    if not neutral:
        raise UnsupportedFeatureError(f"{field} is not supported by this server: leave it out.", param=field)


def _sampling(request: ChatRequest | CompletionRequest, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    stop = request.stop
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=request.top_k or 0,
        min_p=request.min_p or 0.0,
        typical_p=1.0 if request.typical_p is None else request.typical_p,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        logit_bias=_logit_bias(request.logit_bias or {}),
        min_tokens=request.min_tokens or 0,
        ignore_eos=request.ignore_eos,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        seed=request.seed,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=logprobs,
    )


def _logit_bias(raw: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """Token ids are strings on the wire, as JSON wants keys to be."""
    if not all(key.isdecimal() for key in raw):
        raise InvalidRequestError("logit_bias must map token ids to numbers.", param="logit_bias", code="invalid_value")
    return tuple((int(key), bias) for key, bias in raw.items())
