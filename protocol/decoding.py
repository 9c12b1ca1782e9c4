"""The reading of request bodies: null is an absent field, 8.0 an integer, and what is unknown is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

import msgspec

from .errors import (
    InvalidRequestError,
    RequestTooLargeError,
    UnknownFieldError,
    UnsupportedFeatureError,
    WrongTypeError,
)

#: Fields of OpenAI's that no server of ours implements. Errors name them; what else is unknown is a stranger's text.
UNSUPPORTED = frozenset(
    ("audio", "context_management", "conversation", "function_call", "functions", "moderation", "personality",
     "web_search_options")
)  # fmt: skip
_OPAQUE = frozenset({"parameters", "schema", "json"})  # JSON schemas: null means something there
MAX_ENTRIES = 200_000  # objects, lists and fields of one request: each takes longer to read than text does
_MARKS = (b"{", b"[", b":")  # one for each entry
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_MAX_NESTED = 8  # tool calls of messages, and no deeper
_MAX_NAME = 100  # characters of a field's name that an error repeats
_MAX_WORDS = 500  # characters of what msgspec says
#: Raised by msgspec for bytes that are no JSON, or are deeper than it reads.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
R = TypeVar("R")


def read_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises InvalidRequestError."""
    check_entries(body)
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.ValidationError as error:
        fault = "holds a number out of range" if "out of range" in str(error) else "must be a JSON object"
        raise InvalidRequestError(
            f"The request body {fault}.", param=_param_of(str(error)), code="invalid_value"
        ) from error
    except UNREADABLE as error:
        raise InvalidRequestError(f"The request body is not valid JSON: {error}", code="invalid_json") from error


def check_entries(body: bytes) -> None:
    """Raises RequestTooLargeError for JSON of more entries or texts than anybody sends."""
    if len(body) <= MAX_ENTRIES or len(body) - len(body.translate(None, b'{[:"')) <= MAX_ENTRIES:
        return
    quotes = body.count(b'"') - body.count(b'\\"')  # those in texts left out, or nearly so
    found = sum(map(body.count, _MARKS))  # those in texts too
    if quotes > 4 * MAX_ENTRIES or (found > MAX_ENTRIES and sum(map(_TEXT.sub(b"", body).count, _MARKS)) > MAX_ENTRIES):
        raise RequestTooLargeError(
            f"The request body holds more than {MAX_ENTRIES} objects, lists and fields, or twice as many texts: "
            "send fewer."
        )


def decode(body: bytes, kind: type[R]) -> R:
    """JSON as a struct. Raises as `convert` does, and for what is no JSON object."""
    return convert(read_object(body), kind)


def convert(fields: Mapping[str, Any], kind: type[R]) -> R:
    """A decoded object as a struct.

    Raises InvalidRequestError naming the field that does not fit, UnsupportedFeatureError for one that is unknown.
    """
    present = _present(fields, 0)
    for name in _integers(kind):
        if name in present:
            present[name] = integral(present[name])
    try:
        return msgspec.convert(present, kind)
    except msgspec.ValidationError as error:
        raise refusal(str(error)) from error


def read_kept(path: Path, kind: type[R]) -> R | None:
    """What a file of ours holds; None where it is not there or cannot be understood."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def prepare_types(*kinds: Any) -> None:
    """Build what msgspec decodes, where it is defined: threads that build one type together crash the process."""
    for kind in kinds:
        msgspec.json.Decoder(kind)


def refusal(message: str) -> InvalidRequestError:
    """msgspec's message, as an error of ours."""
    param = _param_of(message)
    _, unknown, rest = message.partition("unknown field `")
    if unknown:
        name = rest.partition("`")[0]
        if name in UNSUPPORTED:
            return unsupported(name)
        return UnknownFieldError(f"The field {name[:_MAX_NAME]!r} is not supported by this server.", param=param)
    message = f"Invalid request: {message[:_MAX_WORDS]}"
    if "Expected `" in message:
        return WrongTypeError(message, param=param)
    return InvalidRequestError(message, param=param, code="invalid_value")


def unsupported(param: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"{param} is not supported by this server: leave it out.", param=param)


def integral(value: Any) -> Any:
    """8 for 8.0, also in lists; anything else as it is."""
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return items if {float, list}.isdisjoint(map(type, items)) else [integral(item) for item in items]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _present(fields: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """The fields that are not null, in objects within the object too."""
    return {
        name: value if _is_opaque(name, depth) or depth > _MAX_NESTED else _without_nulls(value, depth + 1)
        for name, value in fields.items()
        if value is not None
    }


def _is_opaque(name: str, depth: int) -> bool:
    return name in _OPAQUE or (depth == 0 and name == "json_schema")


def _without_nulls(value: Any, depth: int) -> object:
    if isinstance(value, dict):
        return _present(cast("dict[str, Any]", value), depth)
    if isinstance(value, list) and depth <= _MAX_NESTED:
        items = cast("list[Any]", value)
        if {dict, list}.isdisjoint(map(type, items)):  # token ids, by the million
            return items
        return [_without_nulls(item, depth + 1) if isinstance(item, dict | list) else item for item in items]
    return cast("object", value)


@cache
def _integers(kind: type) -> tuple[str, ...]:
    """The fields of a struct that take integers and no other numbers."""
    kinds = {name: _types_in(hint) for name, hint in get_type_hints(kind).items()}
    return tuple(name for name, types in kinds.items() if int in types and float not in types)


def _types_in(hint: Any) -> set[Any]:
    inner = get_args(hint)
    return set[Any]().union(*map(_types_in, inner)) if inner else {hint}


def _param_of(message: str) -> str | None:
    """The field a msgspec message is about: from ``- at `$.messages[0].role` `` or ``unknown field `x` ``."""
    for opening in ("at `$.", "field `"):
        _, found, rest = message.partition(opening)
        if found:
            return rest.partition("`")[0][:_MAX_NAME]
    return None
