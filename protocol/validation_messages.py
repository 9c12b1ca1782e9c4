"""Plain words for errors in files: msgspec's validation messages, TOML's syntax errors, and the system's errors."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from types import MappingProxyType

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
_FIELD = re.compile(r"Object (?:missing required|contains (unknown)) field `(.*)`", re.DOTALL)


def plain_words(error: Exception | str, renamed: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return an error's message in plain words, or unchanged if unknown. `renamed`: current name by former name."""
    if isinstance(error, OSError) and error.strerror:
        return f"there is no file {error.filename}" if isinstance(error, FileNotFoundError) else error.strerror
    if isinstance(error, tomllib.TOMLDecodeError):
        return f"the content is not valid TOML: {error}"
    message = str(error)
    fault, at, place = message.rpartition(" - at ")
    if not (at and place.endswith("`") and place.startswith(("`$", "`key` in `$"))):
        fault, place = message, ""
    path = place.removeprefix("`key` in ").strip("`").removeprefix("$").removeprefix(".")
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
    if (value := fault.removeprefix("Invalid enum value ").removeprefix("Invalid value ")) != fault:
        return f"{subject} does not accept {value}"
    if fault == _NAME:
        return f"{subject} must have 1 to 64 letters, digits, dots, underscores and hyphens"
    if fault == "Invalid RFC3339 encoded date":
        return f"{subject} must be a date such as 2026-01-31"
    pattern = fault.removeprefix("Expected `str` matching regex ")
    return f"{subject} must match the pattern {pattern}" if pattern != fault else f"{path}: {fault}" if path else fault
