"""A chat request as the router reads it: the caller, the part for the device, and the body for the cloud."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...accounting.token_estimate import LENGTH_FIELDS, NESTED, THINKING
from ...protocol.decoding import convert, read_object, read_switches
from ...protocol.dialects.chat_chunks import restored
from ...protocol.errors import InvalidRequestError, UnsupportedFeatureError, WrongTypeError, invalid_field
from ...protocol.hints import UNKNOWN
from ...protocol.http.forwarding import NOTHING, Forwarding, forwarded
from ...protocol.http.lenient_json import object_of, table, tables
from ...protocol.http.wire import PrivacyMark, WireRequest
from ...protocol.requests import (
    ChatRequest,
    CompletionRequest,
    ConfidenceSignal,
    Message,
    UpdraftOptions,
    check_message_count,
    read_chat,
)
from ...protocol.safety.names import check_names, check_spelling
from ...protocol.structured import check_functions, ignored
from ...protocol.turns import whole_turns

#: Smallest values that any engine accepts. `_UNBOUNDED` has smaller values that some engines read as "no limit".
_MINIMA = {"temperature": 0, "max_tokens": 1, "max_completion_tokens": 1, "n": 1}
_UNBOUNDED = {"max_tokens": (-1,), "max_completion_tokens": (-1,)}
#: Fields whose contents have other types on some servers. A wrong type in these is no error if a cloud can answer.
_OPEN_ENDED = ("tools", "tool_choice", "response_format", "structured_outputs", "json_schema", "grammar")

#: Names of fields that no request may spell differently.
_KNOWN = frozenset((*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *LENGTH_FIELDS))

#: Header with the name of a request's task, like `metadata.task`.
TASK_HEADER = "x-updraft-task"
RequestedTier = Literal["auto", "local", "cloud"]
_UNSEEN = "\u200b\u2060\ufeff"  # zero-width blanks
_BLANKS = f"\\s{_UNSEEN}"
_BLANK_LINES = re.compile(rf"\A(?:[{_BLANKS}]*[\r\n])?")
_INDENT = re.compile(rf"\A[{_BLANKS}]+")
_INDENTED_LINE = re.compile(r"[\r\n][ \t]+\S")
_END = re.compile(rf"(?<![{_BLANKS}])[{_BLANKS}]+\Z")  # the lookbehind avoids quadratic time
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
#: Header name in stored batch requests for the digest of the API key. Clients cannot send a name with a space.
DIGEST_HEADER = "x-updraft-key digest"


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A chat request with the router's options."""

    requested_tier: RequestedTier
    # Caller's request without the `updraft` options. It may have fields that only the cloud supports.
    body: dict[str, Any]
    # Request for the device's engine; None if the engine cannot process it.
    chat: ChatRequest | None = None
    # Why the engine cannot process the request.
    unsupported: InvalidRequestError | None = None
    # Whether the caller requires that the request stays on the device.
    private: bool = False
    quality: float | None = None
    # Confidence below which the local answer escalates, if the request sets it.
    confidence: float | None = None
    # Signal from which the confidence is computed. None: the signal in the settings.
    confidence_signal: ConfidenceSignal | None = None
    hold_tokens: int | None = None
    # Time at which the caller gives up, on the clock of `time.monotonic()`.
    deadline: float | None = None
    # Name of the privacy rule that the request matches, if any.
    privacy_rule: str | None = None
    # Names of fields in the caller's API, by their names in chat requests, if the request was translated.
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    # Notes on parts of the request that have no effect on any tier.
    notes: tuple[str, ...] = ()
    # Headers and query parameters to forward to a cloud.
    forwarded: Forwarding = NOTHING
    # Value of the header that names the request's task, or an empty string.
    task_header: str = ""

    @property
    def only_local(self) -> bool:
        return self.requested_tier == "local" or self.private or self.privacy_rule is not None

    @property
    def stream(self) -> bool:
        return self.body.get("stream") is True

    @property
    def include_usage(self) -> bool:
        options = object_of(self.body.get("stream_options"))
        return options.get("include_usage") is True

    @property
    def structured(self) -> bool:
        """Return whether the local answer must obey a grammar or may call tools."""
        return self.chat is not None and (self.chat.tool_use is not None or self.chat.constraint() is not None)

    @property
    def has_tools(self) -> bool:
        """Return whether the model must support tools, to call them or to read earlier calls."""
        if self.chat is None:
            return False
        called = any(message.role == "tool" or message.tool_calls is not None for message in self.chat.messages)
        return called or self.chat.tool_use is not None

    @property
    def remaining_s(self) -> float:
        """Seconds until the caller gives up; infinite without a limit."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()


def read_model(body: bytes) -> tuple[dict[str, Any], str]:
    """Return the decoded JSON object and its `model`. Raises InvalidRequestError."""
    decoded = read_object(body)
    model: Any = decoded.get("model")
    if not isinstance(model, str):
        raise InvalidRequestError("model is required: auto, local or cloud.", param="model", code="invalid_value")
    check_fields(decoded)
    return decoded, model


def check_fields(fields: Mapping[str, Any]) -> None:
    """Check names in a request, and the spelling of fields that change the cost. Raises InvalidRequestError."""
    check_names(fields)
    check_spelling(fields, _KNOWN)
    for name in (*NESTED, *THINKING):
        check_spelling(object_of(fields.get(name)), (*LENGTH_FIELDS, *THINKING.values()), f"{name}.")


def read_routing_request(
    request: WireRequest,
    body: dict[str, Any],
    requested_tier: RequestedTier,
    *,
    hold_tokens: int | None,
    started: float,
) -> RoutingRequest:
    """Read a request that arrived at `started` (`time.monotonic()`). `hold_tokens`: default of this option. Raises
    InvalidRequestError if no tier could process the request."""
    read_switches(body, ChatRequest)
    body |= whole_turns(body)
    native = None if request.native is None else replace(request.native, chat=dict(body))
    unknown = take_unknown_hints(body)
    options = take_options(body)
    check_private(options, requested_tier, request.mark)
    _check_frame(body)
    selected = forwarded(request.headers, request.query, request.cloud_key, request.retries)
    body["messages"] = [restored(message) for message in body["messages"]]
    chat, unsupported = _device_request(with_trimmed_turns(body))
    return RoutingRequest(
        requested_tier=requested_tier,
        body=body,
        chat=chat,
        unsupported=unsupported,
        private=options.private or request.mark.is_private,
        quality=options.quality,
        confidence=options.confidence,
        confidence_signal=options.confidence_signal,
        hold_tokens=hold_tokens if options.hold_tokens is None else options.hold_tokens,
        deadline=None if request.timeout_s is None else started + request.timeout_s,
        names=request.names,
        notes=(*request.hints, *selected.notes, *unknown),
        forwarded=replace(selected, native=native),
        task_header=request.headers.get(TASK_HEADER, ""),
    )


def check_private(options: UpdraftOptions, requested_tier: RequestedTier, mark: PrivacyMark) -> None:
    """Raise InvalidRequestError for a private request, or one with private earlier turns, that names the cloud."""
    if options.private and requested_tier == "cloud":
        raise InvalidRequestError(
            "updraft.private keeps a request on this device, but model='cloud' sends it away. Choose one.",
            param="updraft.private",
        )
    if mark.is_private and requested_tier == "cloud":
        raise InvalidRequestError(
            "This request continues a private conversation, which stays on this device, but model='cloud' sends it "
            "away. Use model='auto' or 'local'.",
            code="private",
        )


def continued(messages: Sequence[Message], text: str, *, continues: bool) -> list[Message]:
    """Return `messages` plus an assistant message of `text`. `continues`: append `text` to the last message instead."""
    if continues:
        *before, last = messages
        return [*before, Message(role=last.role, content=last.text + text, name=last.name)]
    return [*messages, Message(role="assistant", content=text)]


def take_unknown_hints(body: dict[str, Any]) -> tuple[str, ...]:
    """Remove the hints of `body` that no engine knows, and return a note on them."""
    return ignored({name: body.pop(name) for name in UNKNOWN if name in body})


def take_options(body: dict[str, Any]) -> UpdraftOptions:
    """Remove and return the `updraft` options of `body`, which no cloud knows. Raises InvalidRequestError."""
    raw = body.pop("updraft", None)
    if raw is None:
        return UpdraftOptions()
    if (given := table(raw)) is None:
        raise invalid_field("updraft", "updraft: the value must be an object.")
    try:
        options = convert(given, UpdraftOptions)
    except InvalidRequestError as error:
        known = ", ".join(UpdraftOptions.__struct_fields__)
        fault = f"updraft: {error.message.rstrip('.')} (known: {known})."
        raise InvalidRequestError(fault, param="updraft", code="invalid_value") from error
    if options.quality is not None and not 0 < options.quality <= 1:
        raise InvalidRequestError("updraft.quality must be above 0 and at most 1.", param="updraft.quality")
    if options.confidence is not None and not 0 < options.confidence < 1:
        raise InvalidRequestError("updraft.confidence must be between 0 and 1.", param="updraft.confidence")
    if options.quality is not None and options.confidence is not None:
        fault = "updraft.quality and updraft.confidence exclude each other. Set only one."
        raise InvalidRequestError(fault, param="updraft.confidence")
    if options.confidence_signal is not None and options.confidence is None:
        fault = "updraft.confidence_signal needs updraft.confidence. Set both."
        raise InvalidRequestError(fault, param="updraft.confidence_signal")
    if options.hold_tokens is not None and options.hold_tokens < 1:
        raise InvalidRequestError("updraft.hold_tokens must be at least 1.", param="updraft.hold_tokens")
    return options


def _check_frame(body: dict[str, Any]) -> None:
    """Check the fields that the router reads, and refuse values that no engine accepts. The tier that answers checks
    all other fields. Raises InvalidRequestError."""
    messages = tables(body.get("messages"))
    if messages is None or not all(isinstance(message.get("role"), str) for message in messages):
        raise invalid_field("messages", "messages must be a list of objects, each with a role.")
    if not messages:
        raise invalid_field("messages", "messages must have at least one message.")
    check_message_count(len(messages))
    if not isinstance(body.get("stream"), bool | None):
        raise invalid_field("stream", "stream must be true or false.")
    check_stream_options(body)
    check_functions(body.get("tools"))
    for param, least in _MINIMA.items():
        value: Any = body.get(param)
        if isinstance(value, int | float) and value < least and value not in _UNBOUNDED.get(param, ()):
            raise invalid_field(param, f"{param} must be at least {least}.")


def check_stream_options(body: dict[str, Any]) -> None:
    """Raise InvalidRequestError for stream options without a stream, which OpenAI refuses too."""
    if body.get("stream_options") is None:
        return
    if table(body["stream_options"]) is None:
        raise invalid_field("stream_options", "stream_options must be an object.")
    if body.get("stream") is not True:
        raise invalid_field("stream_options", "stream_options is only allowed with stream=true.")


def _device_request(body: dict[str, Any]) -> tuple[ChatRequest | None, InvalidRequestError | None]:
    """Return the request for the local engine, or the reason why the engine cannot take it. Raises WrongTypeError."""
    try:
        request = read_chat(body)
    except InvalidRequestError as error:
        if isinstance(error, WrongTypeError) and not (error.param or "").startswith(_OPEN_ENDED):
            raise
        return None, error
    unsupported = unsupported_on_device(request)
    return (request, None) if unsupported is None else (None, unsupported)


def unsupported_on_device(request: ChatRequest | CompletionRequest) -> UnsupportedFeatureError | None:
    """Return the error for a parameter that Updraft's cloud engine supports and the local engine does not, or None."""
    if request.num_candidates > request.num_answers:
        return UnsupportedFeatureError("best_of: this device generates only one candidate per answer.", param="best_of")
    for param in ("return_token_ids", "answer_token_ids"):
        if getattr(request, param):
            return UnsupportedFeatureError(f"{param}: this device supports text, but no token ids.", param=param)
    if request.running_usage:
        return UnsupportedFeatureError(
            "continuous_usage_stats: this device reports usage only at the end of a stream.",
            param="stream_options.continuous_usage_stats",
        )
    return None


def with_trimmed_turns(body: dict[str, Any]) -> dict[str, Any]:
    """Return `body` with trimmed user turns, since blanks around a turn mean nothing but may mislead a small model.
    The result is for the device: clouds get every turn unchanged."""
    messages = tables(body.get("messages"))
    if messages is None:
        return body
    turns = [_trimmed_turn(message) if message.get("role") == "user" else message for message in messages]
    return {**body, "messages": turns}


def trimmed(text: str) -> str:
    """Return `text` without blank lines at the start and white space at the end. The indentation of the first line is
    removed unless another line is indented, too. A text of only white space stays unchanged, and so does the end of
    an open code block."""
    return _end_trimmed(_start_trimmed(text)) or text


def _trimmed_turn(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": trimmed(content)}
    parts = tables(content)
    if not parts:
        return message
    parts = list(parts)
    for at, trim in ((0, _start_trimmed), (-1, _end_trimmed)):
        part = object_of(parts[at])
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            parts[at] = {**part, "text": trim(part["text"]) or part["text"]}
    return {**message, "content": parts}


def _start_trimmed(text: str) -> str:
    text = _BLANK_LINES.sub("", text)
    is_code = text.startswith((" ", "\t")) and _INDENTED_LINE.search(text)
    return text if is_code else _INDENT.sub("", text)


def _end_trimmed(text: str) -> str:
    return text if len(_FENCE.findall(text)) % 2 else _END.sub("", text)


@dataclass(frozen=True, slots=True)
class Caller:
    """Digests of the API key and of the request's `user`: 32 hexadecimal digits each; empty without a key or user."""

    key: str = ""
    user: str = ""

    def with_user(self, body: Mapping[str, Any]) -> Caller:
        """Return the caller with the digest of the `user` field in a request body."""
        user: Any = body.get("user")
        return replace(self, user=_digest(user)) if isinstance(user, str) else self


def caller_of(headers: Mapping[str, str]) -> Caller:
    """Return the caller whose key is in the `Authorization` header, or in Anthropic's `x-api-key`."""
    api_key = headers.get("x-api-key", "")
    scheme, _, key = headers.get("authorization", f"bearer {api_key}" if api_key else "").partition(" ")
    return Caller(_digest(key.strip()) if scheme.lower() == "bearer" else headers.get(DIGEST_HEADER, ""))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()[:32] if secret else ""
