"""Lenient parsing of other servers' responses: malformed JSON, errors in various formats, final stream events."""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Any, cast

import msgspec

from ..decoding import JSON_STRING, UNREADABLE, decode_keeping
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
from ..hints import object_of
from ..safety.redaction import paired

_MAX_MESSAGE, _MAX_EXCERPT = 2000, 300  # maximum characters of an error message, and of a body quoted in it
_MAX_NESTED = 4  # maximum nesting depth in the search for an error message
_MESSAGES = ("message", "error", "detail", "msg", "errors", "title", "description", "error_description")
_LINE_ENDS = bytes.maketrans(b"\n\r", b"  ")  # valid JSON has line ends only between tokens
_CONTROLS = re.compile(rb"[\x00-\x1f]")  # JSON strings must escape these characters
_OTHER_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")
_KINDS = (AuthenticationError, PermissionDeniedError, NotFoundError, RateLimitError, OverloadedError)
_ERRORS: dict[int, type[UpdraftError]] = {
    **{kind.status: kind for kind in _KINDS},
    **dict.fromkeys((408, 504), RequestTimeoutError),
}


def json_of(raw: bytes, *, exact: bool = False) -> Any:
    """Decode JSON from another server. Raises ValueError if it is not JSON or nested too deeply. Accepts a byte order
    mark, UTF-16, invalid UTF-8, NaN and lone surrogates. `exact` keeps lone surrogates, which only `json_bytes` can
    encode again; files and logs cannot hold lone surrogates."""
    try:
        return msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"))
    except UNREADABLE:
        pass
    try:
        text = raw.decode(json.detect_encoding(raw), "replace")
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
        return value if exact else json.loads(paired(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error


def json_keeping(raw: bytes, name: str) -> Any:
    """Decode like `json_of`, but keep the value of each member `name` as raw JSON, so that no number is rounded."""
    try:
        return decode_keeping(raw.removeprefix(b"\xef\xbb\xbf"), name)
    except UNREADABLE:
        return json_of(raw, exact=True)


def json_bytes(value: Any) -> bytes:
    """Encode as JSON, including lone surrogates, since a cloud may split an emoji between two chunks of a stream."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # lone surrogates cannot be UTF-8, but JSON can escape them
        return json.dumps(value, default=_plain, separators=(",", ":")).encode()


def json_line(value: Any) -> bytes:
    return on_one_line(json_bytes(value)) + b"\n"


def on_one_line(raw: bytes) -> bytes:
    """Return JSON on one line. Escapes Unicode's line ends, at which clients may split lines (`str.splitlines`)."""
    line = raw.translate(_LINE_ENDS)
    for end, instead in _OTHER_LINE_ENDS:
        line = line.replace(end, instead)
    return line


def standard_json(raw: bytes) -> bytes:
    """Return JSON that strict parsers accept: `raw` unchanged if possible, which keeps `1.10`, else encoded again.

    Escaped lone surrogates stay, since they are valid JSON. Raises ValueError if `raw` is not JSON for `json_of`.
    """
    value = json_of(raw, exact=True)
    try:
        json.loads(raw.decode(), parse_constant=_refuse_infinite, parse_float=_refuse_infinite)
    except ValueError:
        return json_bytes(value)
    return raw


def raw_object(text: str) -> msgspec.Raw | None:
    """Return the JSON object in `text` unchanged but on one line; `{}` for blank text; None if not an object.

    Some models write line ends and tabs unescaped in strings. These characters are escaped, so that the strings keep
    them.
    """
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # joins halves of surrogate pairs
    raw = (text if text.strip() else "{}").encode(errors="backslashreplace")
    if _CONTROLS.search(raw):
        raw = JSON_STRING.sub(lambda string: _CONTROLS.sub(_escaped, string[0]), raw).translate(_LINE_ENDS)
    try:
        msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return msgspec.Raw(raw)
    except UNREADABLE:
        pass
    try:
        value = json_of(raw, exact=True)
    except ValueError:
        return None
    return msgspec.Raw(json_bytes(value)) if isinstance(value, dict) else None


def _escaped(control: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(control[0])


def _finite(number: str) -> float | None:
    value = float(number)
    return value if isfinite(value) else None


def _refuse_infinite(number: str) -> None:
    if not isfinite(float(number)):
        raise ValueError(f"{number} is not a finite number")


def _plain(value: Any) -> Any:
    """Convert a struct or raw JSON to types that `json.dumps` accepts."""
    return json_of(bytes(value), exact=True) if isinstance(value, msgspec.Raw) else msgspec.to_builtins(value)


def objects_of(value: Any) -> list[dict[str, Any]]:
    """Return the non-empty items of a list as objects; empty if `value` is not a list."""
    return [object_of(each) for each in rows(value) or () if each]


def error_in(raw: bytes, status: int, otherwise: str) -> dict[str, Any]:
    """Convert another server's error to OpenAI's format. If it has no message, the message begins with `otherwise`."""
    try:
        value: Any = json_of(raw)
    except ValueError:
        excerpt = _excerpt(raw)
        return completed({}, status, f"{otherwise}: {excerpt}" if excerpt else f"{otherwise}.")
    if len(items := rows(value) or ()) == 1:  # Google wraps the error in a list
        value = items[0]
    fields = object_of(value)
    body = object_of(fields.get("error"))
    if not isinstance(fields.get("error"), dict):  # older vLLM and others put the fields at the top level
        body = {name: fields[name] for name in ("type", "param", "code") if name in fields}
    if not isinstance(body.get("message"), str) and (message := _message_in(value, _MAX_NESTED)):
        body = {**body, "message": message}
    return completed(body, status, f"{otherwise}.")


def completed(error: dict[str, Any], status: int, otherwise: str) -> dict[str, Any]:
    """Fill in the missing fields of an OpenAI error; existing fields are kept."""
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


def split_final_event(event: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Split an event into its text (None without text) and its finish reason, which some servers send together."""
    choices: list[dict[str, Any]] = event["choices"]
    deltas = [cast("dict[str, Any]", choice.get("delta") or {}) for choice in choices]
    if not any(value for delta in deltas for name, value in delta.items() if name != "role"):
        return None, event
    text = {name: value for name, value in event.items() if name != "usage"}
    text["choices"] = [{**choice, "finish_reason": None} for choice in choices]
    return text, {**event, "choices": [{**choice, "delta": {}, "logprobs": None} for choice in choices]}


def _message_in(body: Any, depth: int) -> str | None:
    """Find the message in an error of any format: a string, a list (FastAPI adds locations), or nested objects."""
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
    """Return the beginning of a body that is not JSON, as one line of text."""
    if b"\0" in raw[:_MAX_EXCERPT]:
        return ""
    text = raw[: 16 * _MAX_EXCERPT].decode("utf-8", "replace").removeprefix("\ufeff")
    if text.lstrip().startswith("<"):
        text = re.sub(r"<(style|script)\b.*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL | re.IGNORECASE)
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= _MAX_EXCERPT else f"{line[:_MAX_EXCERPT]}..."


def table(value: Any) -> dict[str, Any] | None:
    """Return `value` if it is a JSON object, else None."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def object_in(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in `raw`, or an empty object for anything else."""
    try:
        return object_of(json_of(raw))
    except ValueError:
        return {}


def rows(value: Any) -> list[Any] | None:
    """Return `value` if it is a JSON array, else None."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def tables(value: Any) -> list[dict[str, Any]] | None:
    """Return `value` if it is a JSON array of objects, else None."""
    items = rows(value)
    if items is None or not all(isinstance(item, dict) for item in items):
        return None
    return cast("list[dict[str, Any]]", items)
