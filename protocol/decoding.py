"""Decoder of JSON request bodies: null means absent, 8.0 counts as an integer, and unknown fields are errors."""

from __future__ import annotations

import json
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
    invalid_field,
)
from .hints import SWITCHES
from .validation_messages import plain_words

#: OpenAI fields that Updraft does not implement. Logs may name these fields but no other unknown field, because other
#: names may be private text of the caller.
UNSUPPORTED = frozenset(
    ("audio", "conversation", "function_call", "functions", "moderation", "personality",
     "web_search_options")
)  # fmt: skip
_OPAQUE = frozenset({"parameters", "schema", "json", "arguments"})  # fields with free-form JSON, where null is a value
MAX_ENTRIES = 200_000  # maximum objects, lists and fields per request, because parsing them is slow
_MARKS = (b"{", b"[", b":")  # each object, list or field has one of these bytes
JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_LONG_NUMBER = re.compile(rb"\d[\d.]{16}")  # may have more digits than a float holds
_MEDIA = {"image_url": "Image", "input_audio": "Audio", "file": "File"}  # content parts that only some clouds accept
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_NESTED = 8  # maximum depth at which nulls are dropped; tool calls in messages are this deep
_MAX_NAME = 100  # maximum characters of a field's name in an error
_MAX_CHARACTERS = 500  # maximum characters of msgspec's message in an error
#: Exceptions that msgspec raises for bytes that are not JSON or are nested too deeply.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
R = TypeVar("R")


def read_object(body: bytes, *, exact: str = "") -> dict[str, Any]:
    """Decode a JSON object. Raises InvalidRequestError.

    If `body` holds numbers that a float would round, the values of all members named `exact` stay raw JSON.
    """
    check_entries(body)
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        return decode_keeping(body, exact) if exact and _LONG_NUMBER.search(body) else fields
    except msgspec.ValidationError as error:
        fault = "A number is out of range." if "out of range" in str(error) else "The body must be a JSON object."
        raise invalid_field(_param_of(str(error)), fault) from error
    except UNREADABLE as error:
        raise unreadable(body, error) from error


def decode_keeping(raw: bytes, name: str) -> Any:
    """Decode JSON, but keep the value of each member `name` as raw JSON. Raises the exceptions in UNREADABLE."""
    first = raw.lstrip()[:1]
    if first == b"{":
        members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return {key: value if key == name else decode_keeping(bytes(value), name) for key, value in members.items()}
    if first == b"[":
        return [decode_keeping(bytes(value), name) for value in msgspec.json.decode(raw, type=list[msgspec.Raw])]
    return msgspec.json.decode(raw)


def unreadable(body: bytes, error: Exception) -> InvalidRequestError:
    """Return the error for a body that msgspec cannot decode. For an unpaired surrogate, the error names the field."""
    try:
        field = _surrogate_in(json.loads(body))
    except (ValueError, RecursionError):
        field = None
    if field is None:
        return InvalidRequestError(f"The request body is not valid JSON: {error}", code="invalid_json")
    fault = r"is not valid Unicode: it holds half of a surrogate pair such as \ud83d. Send whole characters"
    return invalid_field(field or None, f"{field or 'A field name'} {fault}.")


def _surrogate_in(value: Any) -> str | None:
    """Return the path of the first text with an unpaired surrogate (for a field name: of its object), or None."""
    waiting: list[tuple[str, Any]] = [("", value)]
    for path, each in waiting:  # the list grows in the loop; recursion would be slow for deep values
        if isinstance(each, dict):
            for name, item in cast("dict[str, Any]", each).items():
                waiting += [(path, name), (f"{path}.{name}".lstrip(".")[:_MAX_NAME], item)]
        elif isinstance(each, list):
            waiting += [(f"{path}[{index}]"[:_MAX_NAME], item) for index, item in enumerate(cast("list[Any]", each))]
        elif isinstance(each, str) and _SURROGATE.search(each):
            return path
    return None


def check_entries(body: bytes) -> None:
    """Count objects, lists, fields and strings before parsing. Raises RequestTooLargeError above the limits."""
    if len(body) <= MAX_ENTRIES or len(body) - len(body.translate(None, b'{[:"')) <= MAX_ENTRIES:
        return
    quotes = body.count(b'"') - body.count(b'\\"')  # without escaped quotes, approximately
    if quotes > 4 * MAX_ENTRIES or (
        _num_marks(body) > MAX_ENTRIES and _num_marks(JSON_STRING.sub(b"", body)) > MAX_ENTRIES
    ):
        raise RequestTooLargeError(
            f"The request body holds more than {MAX_ENTRIES} objects, lists and fields, or more than "
            f"{2 * MAX_ENTRIES} strings: send fewer."
        )


def _num_marks(body: bytes) -> int:
    return sum(map(body.count, _MARKS))


def decode(body: bytes, kind: type[R]) -> R:
    """Decode a JSON object into a struct. Raises the errors of `read_object` and `convert`; refuses repeated names."""
    fields = read_object(body)
    try:
        json.loads(body, object_pairs_hook=_check_once, parse_int=str)
    except RecursionError as error:  # `json` allows fewer levels than msgspec
        raise unreadable(body, error) from error
    return convert(fields, kind)


def _check_once(pairs: list[tuple[str, Any]]) -> None:
    """Refuse an object with a repeated name, because parsers differ on which value counts."""
    seen = set[str]()
    for name, _ in pairs:
        if name in seen:
            raise invalid_field(name[:_MAX_NAME], f"The field {name[:_MAX_NAME]!r} is given twice: send it once.")
        seen.add(name)


def convert(fields: Mapping[str, Any], kind: type[R]) -> R:
    """Convert a decoded object to a struct. Raises InvalidRequestError or UnsupportedFeatureError, naming the field."""
    present: dict[str, Any] = _without_nulls(dict(fields), 0)
    read_switches(present, kind)
    for name, types in _types(kind).items():
        if int in types and float not in types and name in present:
            present[name] = integral(present[name])
    try:
        return msgspec.convert(present, kind)
    except msgspec.ValidationError as error:
        raise refusal(str(error), kind) from error


def read_kept(path: Path, kind: type[R]) -> R | None:
    """Decode one of Updraft's JSON state files; None if the file is missing, unreadable or malformed."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def prepare_types(*kinds: Any) -> None:
    """Build msgspec's type information at import, because two threads that build one type at once crash the process."""
    for kind in kinds:
        msgspec.json.Decoder(kind)


def refusal(message: str, kind: Any = None) -> InvalidRequestError:
    """Convert msgspec's validation message to an error in the caller's terms, which names the field.

    `kind`: the type that was expected, as in `plain_words`.
    """
    param = _param_of(message)
    _, unknown, rest = message.partition("unknown field `")
    if unknown:
        name = rest.partition("`")[0]
        if name in UNSUPPORTED:
            return unsupported(name)
        return UnknownFieldError(f"The field {name[:_MAX_NAME]!r} is not supported by this server.", param=param)
    if (media := message.partition("Invalid value '")[2].partition("'")[0]) in _MEDIA:
        fault = f"{_MEDIA[media]} input is not supported by this model: send text, or ask a model that supports it."
        return UnsupportedFeatureError(fault, param=param)
    fault = f"Invalid request: {plain_words(message, kind=kind)[:_MAX_CHARACTERS]}."
    return WrongTypeError(fault, param=param) if "Expected `" in message else invalid_field(param, fault)


def unsupported(param: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"{param} is not supported by this server: leave it out.", param=param)


def integral(value: Any) -> Any:
    """Convert whole floats to integers (8.0 to 8), also in lists; return other values unchanged."""
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return items if {float, list}.isdisjoint(map(type, items)) else [integral(item) for item in items]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read_switches(fields: dict[str, Any], kind: type) -> None:
    """Convert the texts "true" and "false" to booleans where `kind` has booleans, also in nested structs."""
    for name, types in _types(kind).items():
        value = fields.get(name)
        if isinstance(value, str) and bool in types and str not in types:
            fields[name] = SWITCHES.get(value.lower(), value)
        elif isinstance(value, dict | list):
            parts = cast("list[Any]", value if isinstance(value, list) else [value])
            for inner in filter(_has_switches, types):
                for part in filter(lambda each: isinstance(each, dict), parts):
                    read_switches(part, inner)


def _without_nulls(value: Any, depth: int) -> Any:
    """Drop fields that are null from objects at any depth up to `_MAX_NESTED`, except inside free-form JSON."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value).items()
        opaque = _OPAQUE if depth else (*_OPAQUE, "json_schema")
        return {
            name: item if name in opaque or depth > _MAX_NESTED else _without_nulls(item, depth + 1)
            for name, item in fields
            if item is not None
        }
    if isinstance(value, list) and depth <= _MAX_NESTED:
        items = cast("list[Any]", value)
        if {dict, list}.isdisjoint(map(type, items)):  # no copy, because a list may hold millions of ids
            return items
        return [_without_nulls(item, depth + 1) for item in items]
    return cast("Any", value)


@cache
def _types(kind: type) -> dict[str, set[Any]]:
    """Return the types that each field of a struct accepts, including those of list items."""
    return {name: _member_types(hint) for name, hint in get_type_hints(kind).items()}


@cache
def _has_switches(kind: Any) -> bool:
    if not isinstance(kind, type) or not issubclass(kind, msgspec.Struct):
        return False
    return any(bool in types or any(map(_has_switches, types)) for types in _types(kind).values())


def _member_types(hint: Any) -> set[Any]:
    inner = get_args(hint)
    return set[Any]().union(*map(_member_types, inner)) if inner else {hint}


def _param_of(message: str) -> str | None:
    """Extract the field from a msgspec message: ``- at `$.messages[0].role` `` or ``unknown field `x` ``."""
    match = re.search(r"at `\$\.([^`]*)", message) or re.search(r"field `([^`]*)", message)
    return None if match is None else match[1][:_MAX_NAME]
