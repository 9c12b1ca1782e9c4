"""One chat request as the router understands it: what the device can do with it, and what would go to the cloud."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ...protocol.errors import InvalidRequestError, UnsupportedFeatureError
from ...protocol.http.wire import WireRequest
from ...protocol.requests import ChatRequest, Message, UpdraftOptions, parse_chat
from ...protocol.safety.names import check_names
from .json_narrowing import parsed, table, tables

RequestedTier = Literal["auto", "local", "cloud"]


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """`chat` is the request as the device's engine takes it, or None with `unsupported` saying why it cannot. `body`
    is what the caller sent, decoded, without our own `updraft` options: the cloud may know more fields than we do.
    `deadline` is on the clock of `time.monotonic()`.
    """

    requested_tier: RequestedTier
    body: dict[str, Any]
    chat: ChatRequest | None
    unsupported: InvalidRequestError | None
    # The caller said so.
    private: bool
    quality: float | None
    quality_given: bool
    # The threshold of the plain cascade, where the request asks for that.
    confidence: float | None
    hold_tokens: int | None
    deadline: float | None
    # A rule did.
    privacy_rule: str | None = None

    @property
    def stream(self) -> bool:
        return self.body.get("stream") is True

    @property
    def include_usage(self) -> bool:
        options = table(self.body.get("stream_options")) or {}
        return options.get("include_usage") is True

    @property
    def structured(self) -> bool:
        """Whether the device's answer is held to a form, or may call tools."""
        return self.chat is not None and (self.chat.tool_use is not None or self.chat.constraint() is not None)

    @property
    def has_tools(self) -> bool:
        """Whether the model must know tools: to call them, or to read what was called before."""
        if self.chat is None:
            return False
        called = any(message.role == "tool" or message.tool_calls is not None for message in self.chat.messages)
        return called or self.chat.tool_use is not None

    @property
    def remaining_s(self) -> float:
        """Seconds until the caller's patience ends; infinite if it has no limit."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()


def read_model(body: bytes) -> tuple[dict[str, Any], str]:
    """The decoded JSON object and its `model`. Raises InvalidRequestError."""
    try:
        decoded = table(parsed(body))
    except ValueError as error:
        raise InvalidRequestError(f"The request body is {error}", code="invalid_json") from error
    if decoded is None:
        raise InvalidRequestError("The request body must be a JSON object.", code="invalid_json")
    model: Any = decoded.get("model")
    if not isinstance(model, str):
        raise InvalidRequestError("model is required: auto, local or cloud.", param="model", code="invalid_value")
    check_names(decoded)
    return decoded, model


def read_routing_request(
    request: WireRequest,
    body: dict[str, Any],
    requested_tier: RequestedTier,
    *,
    hold_tokens: int | None,
    started: float,
) -> RoutingRequest:
    """Check a request that came at `started`, on the clock of `time.monotonic()`. `hold_tokens`: where it says none.

    Raises InvalidRequestError if no tier could make sense of it.
    """
    options = take_options(body)
    if options.private and requested_tier == "cloud":
        raise InvalidRequestError(
            "updraft.private keeps a request on this device, model='cloud' sends it away: choose one.",
            param="updraft.private",
        )
    chat, unsupported = _for_the_device(body)
    return RoutingRequest(
        requested_tier=requested_tier,
        body=body,
        chat=chat,
        unsupported=unsupported,
        private=options.private,
        quality=options.quality,
        quality_given=options.quality is not None,
        confidence=options.confidence,
        hold_tokens=hold_tokens if options.hold_tokens is None else options.hold_tokens,
        deadline=None if request.timeout_s is None else started + request.timeout_s,
    )


def continued(messages: Sequence[Message], text: str, *, continues: bool) -> list[Message]:
    """`messages` with `text` as the beginning of the assistant's turn; `continues`: the last message is that turn."""
    if continues:
        *before, last = messages
        return [*before, Message(role=last.role, content=last.text + text, name=last.name)]
    return [*messages, Message(role="assistant", content=text)]


def take_options(body: dict[str, Any]) -> UpdraftOptions:
    """Our own options, which are taken out of `body`: no cloud knows them. Raises InvalidRequestError."""
    raw = body.pop("updraft", None)
    if raw is None:
        return UpdraftOptions()
    try:
        options = msgspec.convert(raw, UpdraftOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(UpdraftOptions.__struct_fields__)
        raise InvalidRequestError(
            f"updraft: {error} (known: {known}).", param="updraft", code="invalid_value"
        ) from error
    if options.quality is not None and not 0 < options.quality <= 1:
        raise InvalidRequestError("updraft.quality must be above 0 and at most 1.", param="updraft.quality")
    if options.confidence is not None and not 0 < options.confidence < 1:
        raise InvalidRequestError("updraft.confidence must be between 0 and 1.", param="updraft.confidence")
    if options.quality is not None and options.confidence is not None:
        raise InvalidRequestError(
            "updraft.quality and updraft.confidence exclude each other: state one target.", param="updraft.confidence"
        )
    if options.hold_tokens is not None and options.hold_tokens < 1:
        raise InvalidRequestError("updraft.hold_tokens must be at least 1.", param="updraft.hold_tokens")
    return options


def _for_the_device(body: dict[str, Any]) -> tuple[ChatRequest | None, InvalidRequestError | None]:
    """The request as our own engine takes it, or why it cannot; raises what is wrong for any engine."""
    try:
        request = parse_chat(msgspec.json.encode(body))
        beyond = _beyond_the_device(request)
        return (request, None) if beyond is None else (None, beyond)
    except InvalidRequestError as error:
        if error.code == "unsupported_parameter" or _may_be_understood_elsewhere(body, error):
            return None, error
        raise


def _beyond_the_device(request: ChatRequest) -> UnsupportedFeatureError | None:
    """What our cloud can do and the engine on the device cannot."""
    if request.num_answers > 1:
        return UnsupportedFeatureError("n: this device gives one answer.", param="n")
    if request.num_candidates > 1:
        return UnsupportedFeatureError("best_of: this device makes one answer.", param="best_of")
    if request.use_beam_search:
        return UnsupportedFeatureError("use_beam_search: this device has no beams.", param="use_beam_search")
    if request.prompt_logprobs is not None:
        return UnsupportedFeatureError("prompt_logprobs: this device has none.", param="prompt_logprobs")
    if request.running_usage:
        return UnsupportedFeatureError(
            "continuous_usage_stats: this device tells usage at the end.", param="stream_options.continuous_usage_stats"
        )
    return None


def _may_be_understood_elsewhere(body: dict[str, Any], error: InvalidRequestError) -> bool:
    """A field, role or content part that is unknown here may be a feature of the cloud's; a bad value is not."""
    messages = tables(body.get("messages"))
    if not messages or not all(isinstance(message.get("role"), str) for message in messages):
        return False
    about = error.param or ""
    if about.startswith("messages"):
        return any(_is_beyond_text(message) for message in messages)
    if about.startswith(("tools[", "tool_choice", "response_format")) and error.code == "invalid_value":
        return True  # other kinds of tools and formats
    return "unknown field" in error.message


def _is_beyond_text(message: dict[str, Any]) -> bool:
    """Tool turns, tool calls, images, audio: well-formed in OpenAI's protocol, and not for a small text model."""
    if message["role"] in ("tool", "function") or message.get("tool_calls"):
        return True
    return any(part.get("type") != "text" for part in tables(message.get("content")) or [])
