"""The answers of other servers, read leniently: their JSON, their errors in many shapes, the last pieces of streams."""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any, cast

import msgspec

from ..decoding import UNREADABLE
from ..errors import (
    AuthenticationError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RateLimitError,
    RequestTimeoutError,
    UpdraftError,
    UpstreamError,
)
from ..safety.redaction import paired

_MAX_MESSAGE, _MAX_EXCERPT = 2000, 300  # characters
_MAX_NESTED = 4  # objects in one another, around a message
_MESSAGES = ("message", "error", "detail", "msg", "errors", "title", "description", "error_description")
_LINE_ENDS = {0x0A: " ", 0x0D: " "}  # stand between the tokens of JSON only
_ERRORS: dict[int, type[UpdraftError]] = {
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    408: RequestTimeoutError,
    429: RateLimitError,
    503: OverloadedError,
    504: RequestTimeoutError,
}


def json_of(raw: bytes, *, exact: bool = False) -> Any:
    """The JSON that a server sent. Raises ValueError if it is none, or nested deeper than anybody means.

    A byte order mark, UTF-16, bytes that are no UTF-8, NaN and halves of surrogate pairs lose no answer.
    `exact`: leave such halves as they are, for `json_bytes` to write again. No file or log can hold them.
    """
    try:
        return msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"))
    except UNREADABLE:
        pass
    try:
        text = raw.decode(json.detect_encoding(raw), "replace")
        found = json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
        return found if exact else json.loads(paired(json.dumps(found, ensure_ascii=False)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error


def json_keeping(raw: bytes, name: str) -> Any:
    """The same, with the values of each member `name` as raw JSON, so that no number in them is rounded."""
    try:
        return _keeping(raw.removeprefix(b"\xef\xbb\xbf"), name)
    except UNREADABLE:
        return json_of(raw, exact=True)


def _keeping(raw: bytes, name: str) -> Any:
    first = raw.lstrip()[:1]
    if first == b"{":
        members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return {key: value if key == name else _keeping(bytes(value), name) for key, value in members.items()}
    if first == b"[":
        return [_keeping(bytes(value), name) for value in msgspec.json.decode(raw, type=list[msgspec.Raw])]
    return msgspec.json.decode(raw)


def json_bytes(value: Any) -> bytes:
    """`value` as JSON, also with halves of surrogate pairs: clouds cut an emoji between two pieces of a stream."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # UTF-8 has no halves, but JSON has escapes for them
        return json.dumps(value, default=_plain, separators=(",", ":")).encode()


def raw_object(text: str) -> msgspec.Raw | None:
    """The JSON object in `text`, byte for byte but on one line; an empty one for no text. None if it is no object."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # joins pairs that a stream cut
    raw = (text if text.strip() else "{}").translate(_LINE_ENDS).encode(errors="backslashreplace")
    try:
        msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return msgspec.Raw(raw)
    except UNREADABLE:
        pass
    try:
        found = json_of(raw, exact=True)
    except ValueError:
        return None
    return msgspec.Raw(json_bytes(found)) if isinstance(found, dict) else None


def _finite(number: str) -> float | None:
    value = float(number)
    return value if isfinite(value) else None


def _plain(value: Any) -> Any:
    """A struct or raw JSON as `json.dumps` takes it."""
    return json_of(bytes(value), exact=True) if isinstance(value, msgspec.Raw) else msgspec.to_builtins(value)


def object_of(value: Any) -> dict[str, Any]:
    """The object that this should be; empty where it is none."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def objects_of(value: Any) -> list[dict[str, Any]]:
    """The objects in what should be a list of them."""
    return [object_of(each) for each in cast("list[Any]", value) if each] if isinstance(value, list) else []


def error_in(raw: bytes, status: int, otherwise: str) -> dict[str, Any]:
    """The error that a server sent, in OpenAI's shape. `otherwise`: how a message of our own begins."""
    try:
        found: Any = json_of(raw)
    except ValueError:
        excerpt = _excerpt(raw)
        return completed({}, status, f"{otherwise}: {excerpt}" if excerpt else f"{otherwise}.")
    if isinstance(found, list) and len(cast("list[Any]", found)) == 1:  # Google's
        found = cast("list[Any]", found)[0]
    fields = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    error: Any = fields.get("error")
    if not isinstance(error, dict):  # vLLM's of old, and others': all of it at the top
        error = {name: fields[name] for name in ("type", "param", "code") if name in fields}
    body = cast("dict[str, Any]", error)
    if not isinstance(body.get("message"), str) and (message := _message_in(found, _MAX_NESTED)):
        body = {**body, "message": message}
    return completed(body, status, f"{otherwise}.")


def completed(error: dict[str, Any], status: int, otherwise: str) -> dict[str, Any]:
    """`error` with all that OpenAI's have; what it says itself is kept."""
    usual = _ERRORS.get(status, InvalidRequestError if status < 500 else UpstreamError)
    message: Any = error.get("message")
    if not isinstance(message, str) or not message.strip():
        message, error = otherwise, {"code": usual.default_code, **error}
    kind: Any = error.get("type")
    return {
        **{name: error[name] for name in error if len(name) <= 100},
        "message": message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}...",
        "type": kind if isinstance(kind, str) and kind else usual.type,
        "param": error.get("param"),
        "code": error.get("code"),
    }


def apart(event: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The last text of a stream, if the event has any, and the finish behind it: some servers send both at once."""
    choices: list[dict[str, Any]] = event["choices"]
    deltas = [cast("dict[str, Any]", choice.get("delta") or {}) for choice in choices]
    if not any(value for delta in deltas for name, value in delta.items() if name != "role"):
        return None, event
    text = {**event, "choices": [{**choice, "finish_reason": None} for choice in choices]}
    nothing: dict[str, Any] = {"delta": {}, "logprobs": None}
    return {name: value for name, value in text.items() if name != "usage"}, {
        **event,
        "choices": [{**choice, **nothing} for choice in choices],
    }


def _message_in(body: Any, depth: int) -> str | None:
    """The words in an error of any shape: a text, a list of what is wrong (FastAPI says where), or these in objects."""
    if isinstance(body, str):
        return body.strip() or None
    if depth and isinstance(body, list):
        parts = [_message_in(item, depth - 1) for item in cast("list[Any]", body)]
        return "; ".join(part for part in parts if part) or None
    if not depth or not isinstance(body, dict):
        return None
    fields = cast("dict[str, Any]", body)
    words = next((words for name in _MESSAGES if (words := _message_in(fields.get(name), depth - 1))), None)
    place = fields.get("loc")
    if words and isinstance(place, list):
        return f"{'.'.join(map(str, cast('list[Any]', place)))}: {words}"
    return words


def _excerpt(raw: bytes) -> str:
    """The beginning of a body that is not JSON, as one line of text."""
    if b"\0" in raw[:_MAX_EXCERPT]:
        return ""
    text = raw[: 16 * _MAX_EXCERPT].decode("utf-8", "replace").removeprefix("\ufeff")
    if text.lstrip().startswith("<"):
        text = re.sub(r"<(style|script)\b.*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL | re.IGNORECASE)
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= _MAX_EXCERPT else f"{line[:_MAX_EXCERPT]}..."
