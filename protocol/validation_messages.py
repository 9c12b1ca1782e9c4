"""Plain words for errors in files: msgspec's validation messages, TOML's syntax errors, and the system's errors."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from .hints import object_of

_EXPECTED = MappingProxyType(
    {"array": "a list", "object": "an object", "str": "a string", "int": "an integer",
     "float": "a number", "bool": "true or false"}
)  # fmt: skip
_ACTUAL = MappingProxyType({**_EXPECTED, "float": "a fraction", "bool": "a boolean", "null": "null"})
_COMPARISONS = MappingProxyType({">=": "at least ", "<=": "at most ", ">": "above ", "<": "below "})
_TYPE = re.compile(r"Expected `(.+)`, got `(.+)`")
_BOUND = re.compile(r"Expected `\w+` (?:(>=|<=|>|<) |that's )(.+)")
_LENGTH = re.compile(r"Expected `(\w+)` of (at least )?length (?:(>=|<=) )?(\d+(?: to \d+)?)(, got \d+)?")
_NAME = r"Expected `str` matching regex '\\A[A-Za-z0-9._-]{1,64}\\Z'"
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")
_FIELD = re.compile(r"Object (?:missing required|contains (unknown)) field `(.*)`", re.DOTALL)


def plain_words(
    error: Exception | str, renamed: Mapping[str, str] = MappingProxyType({}), *, value: Any = None, kind: Any = None
) -> str:
    """Return an error's message in plain words; unknown messages are unchanged. `renamed`: current name by former name.

    `kind`: the type that was expected, to state the accepted values. `value`: the value that was converted, to name the
    faulty entry of a table.
    """
    if isinstance(error, OSError) and error.strerror:
        return f"there is no file {error.filename}" if isinstance(error, FileNotFoundError) else error.strerror
    if isinstance(error, tomllib.TOMLDecodeError):
        return f"the content is not valid TOML: {error}"
    message = str(error)
    fault, at, place = message.rpartition(" - at ")
    if not (at and place.endswith("`") and place.startswith(("`$", "`key` in `$"))):
        fault, place = message, ""
    path, accepted = _located(fault, place.removeprefix("`key` in ").strip("`").removeprefix("$"), value, kind)
    subject = "a key of " * place.startswith("`key`") + (f"`{path}`" if path else "the content")
    if match := _FIELD.fullmatch(fault):
        name = f"{path}.{match[2]}" if path else match[2]
        if match[2] in renamed:
            return f"`{name}` is now `{renamed[match[2]]}`"
        return f"there is no setting `{name}`" if match[1] else f"`{name}` is missing"
    if match := _TYPE.fullmatch(fault):
        kinds = [_EXPECTED.get(kind, kind) for kind in match[1].split(" | ") if kind != "null"]
        return f"{subject} must be {' or '.join(kinds)}, not {_ACTUAL.get(match[2], match[2])}"
    if match := _LENGTH.fullmatch(fault):
        one, more = ("character", "characters") if match[1] == "str" else ("entry", "entries")
        bound = _COMPARISONS.get(match[3], match[2] or "")
        return f"{subject} must have {bound}{match[4]} {one if match[4] == '1' else more}{match[5] or ''}"
    if match := _BOUND.fullmatch(fault):
        return f"{subject} must be {_COMPARISONS.get(match[1], '')}{match[2].removesuffix('.0')}"
    if (given := fault.removeprefix("Invalid enum value ").removeprefix("Invalid value ")) != fault:
        return f"{subject} must be {accepted}, not {given}" if accepted else f"{subject} does not accept {given}"
    if fault == _NAME:
        return f"{subject} must have 1 to 64 letters, digits, dots, underscores and hyphens"
    if fault == "Invalid RFC3339 encoded date":
        return f"{subject} must be a date such as 2026-01-31"
    pattern = fault.removeprefix("Expected `str` matching regex ")
    return f"{subject} must match the pattern {pattern}" if pattern != fault else f"{path}: {fault}" if path else fault


def _located(fault: str, path: str, value: Any, kind: Any) -> tuple[str, str]:
    """Return the path with the names of tables' entries in place of `[...]`, and the words that are accepted there."""
    kinds, parents, named = list(_alternatives(kind)), list[Any](), ""
    for step in _STEP.finditer(path):
        part, rest = step[0], path[step.end() :]
        is_list = isinstance(value, list | tuple)
        entries: dict[Any, Any] = dict(enumerate(cast("list[Any]", value))) if is_list else object_of(value)
        if part == "[...]":
            inside = [inner for each in kinds for inner in _inner(each, "")]
            faulty = (name for name, entry in entries.items() if _has_fault(entry, inside, fault, rest))
            part = next((f".{name}" for name in faulty), part)
        key = int(step[2]) if step[2] else part.removeprefix(".")
        value = entries.get(key)
        parents, kinds = kinds, [inner for each in kinds for inner in _inner(each, key)]
        named += part
    words = [word for each in kinds if get_origin(each) is Literal for word in get_args(each)]
    structs = [each for each in parents if isinstance(each, type) and issubclass(each, msgspec.Struct)]
    words += [each.__struct_config__.tag for each in structs if named.endswith(f".{each.__struct_config__.tag_field}")]
    *first, last = map(str, words or [""])
    return named.removeprefix("."), f"{', '.join(first)} or {last}" if first else last


def _has_fault(value: Any, kinds: list[Any], fault: str, path: str) -> bool:
    """Return whether a strict conversion of `value` to one of the types fails with `fault` at `path`."""
    for kind in kinds:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            return str(error) == (f"{fault} - at `${path}`" if path else fault)
    return False


def _alternatives(kind: Any) -> Iterator[Any]:
    """Yield the types of a union, without their annotations."""
    if get_origin(kind) is Annotated:
        yield from _alternatives(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for each in get_args(kind):
            yield from _alternatives(each)
    else:
        yield kind


def _inner(kind: Any, key: str | int) -> Iterator[Any]:
    """Yield the types of a field, or of an entry of a list or table."""
    args = get_args(kind)
    if get_origin(kind) is dict:
        yield from _alternatives(args[1])
    elif get_origin(kind) in (list, tuple):
        yield from _alternatives(args[0])
    elif isinstance(kind, type):
        yield from _alternatives(get_type_hints(kind).get(str(key)))
