"""JSON schemas of clients, without the words that hold an answer to nothing.

JSON Schema lets anyone add words, and says that some allow everything: a `format` that nobody knows, `uniqueItems`
false, `not` of what cannot be. llguidance passes over most of them and refuses the schema for some. Those are taken
out; what does hold an answer to something stays, so that it is enforced or refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeGuard, cast

# Those that llguidance enforces.
_FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
_ANNOTATION = re.compile(
    r"title|description|examples?|default|\$comment|deprecated|readOnly|writeOnly|content(Encoding|MediaType|Schema)"
    r"|\$(dynamicAnchor|recursiveAnchor|vocabulary)|x-.*"
)
_SCHEMA = re.compile(
    r"items|additionalItems|prefixItems|contains|additionalProperties|unevaluated(Items|Properties)|propertyNames"
    r"|allOf|anyOf|oneOf|not|if|then|else"
)
_BY_NAME = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"])
_EXACT = 2**53  # up to here every integer is a double, which is what llguidance computes with
_FIRST, _LAST = -(2**63) + 1024, 2**63 - 1  # the integers that llguidance computes with
#: For each bound: the one that leaves it out, and which way leads inside.
_BOUNDS = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))
_EVERYTHING: tuple[object, ...] = (True, {})
_NEUTRAL: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "uniqueItems": lambda value, _: value is False,
    "format": lambda value, _: value not in _FORMATS,
    "propertyNames": lambda value, _: value in (*_EVERYTHING, {"type": "string"}),
    "unevaluatedItems": lambda value, _: value in _EVERYTHING,
    "unevaluatedProperties": lambda value, _: value in _EVERYTHING,
    "not": lambda value, _: value is False or value == {"not": {}},
    "if": lambda _, schema: "then" not in schema and "else" not in schema,
    "then": lambda _, schema: "if" not in schema,
    "else": lambda _, schema: "if" not in schema,
    "contains": lambda _, schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    "minContains": lambda value, schema: value == 0 or "contains" not in schema,
    "maxContains": lambda _, schema: "contains" not in schema,
    "dependentRequired": lambda value, _: value == {},
    "dependentSchemas": lambda value, _: value == {},
    "dependencies": lambda value, _: value == {},
    "$id": lambda value, _: not isinstance(value, str) or any(map(str.isspace, value)),
    "$schema": lambda value, _: not str(value).startswith(("http://json-schema.org/", "https://json-schema.org/")),
}


class InexactError(Exception):
    """An integer that no answer can be held to exactly."""


def essential(schema: Any) -> Any:
    """The schema without what changes no answer. Names of properties and values are left alone, whatever they are.

    Raises InexactError for an integer that llguidance would round.
    """
    if isinstance(schema, list):
        return [essential(item) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    found = cast("dict[str, Any]", schema)
    for word in ("const", "enum"):
        values = found.get(word)
        for value in cast("list[Any]", values) if isinstance(values, list) else [values]:
            if isinstance(value, int) and not (abs(value) < 2**63 and int(float(value)) == value):
                raise InexactError(f"{word}: {value} cannot be held to exactly; integers up to 2^53 can")
    if found.get("type") != "number":
        found = _with_exact_bounds(found)
    return {word: _inside(word, value) for word, value in found.items() if not _says_nothing(word, value, found)}


def _with_exact_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Bounds of integers beyond 2^53 at the next double that lies within them: no answer is out of bounds.

    Raises InexactError where that leaves nothing.
    """
    inner = dict(schema)
    limits: list[int] = []
    for inclusive, exclusive, step in _BOUNDS:
        bounds = [
            int(bound) + shift
            for word, shift in ((inclusive, 0), (exclusive, step))
            if _is_integral(bound := schema.get(word))
        ]
        if not bounds or max(map(abs, bounds)) < _EXACT:
            continue
        limit = max(bounds, key=lambda bound: bound * step)
        limits.append(limit)
        inner.pop(exclusive, None)
        inner[inclusive] = _double_within(limit, step)
    if not limits:
        return schema
    low, high = inner.setdefault("minimum", _FIRST), inner.setdefault("maximum", _LAST)
    if not _FIRST <= low <= high <= _LAST:
        raise InexactError(f"the bound {limits[0]} cannot be held to exactly; integers up to 2^53 can")
    return inner


def _double_within(bound: int, step: int) -> int:
    """The first double from `bound` on, up or down, within what llguidance computes with."""
    if not _FIRST < bound < _LAST:
        first = _LAST if step < 0 else _FIRST
        return first if (first - bound) * step >= 0 else bound
    near = float(bound)
    return int(near if (int(near) - bound) * step >= 0 else math.nextafter(near, step * math.inf))


def _is_integral(value: Any) -> TypeGuard[int | float]:
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _inside(word: str, value: Any) -> Any:
    if word in _BY_NAME and isinstance(value, dict):
        return {name: essential(item) for name, item in cast("dict[str, Any]", value).items()}
    return essential(value) if _SCHEMA.fullmatch(word) else value


def _says_nothing(word: str, value: Any, schema: dict[str, Any]) -> bool:
    neutral = _NEUTRAL.get(word)
    return bool(_ANNOTATION.fullmatch(word)) or (neutral is not None and neutral(value, schema))
