"""Normal form of JSON schemas: closed objects, and no keywords without effect on the answer.

JSON Schema allows unknown keywords and keywords without effect: an unknown `format`, `uniqueItems` false, `not` of an
unsatisfiable schema. llguidance ignores most of these keywords, but some make it refuse the schema. This module removes
all of them. Effective keywords stay: llguidance enforces a keyword, or refuses the schema with an error that names it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard, cast

from ...protocol.schemas.enforceable import FORMATS

_ANNOTATION = re.compile(
    r"title|description|examples?|default|\$comment|deprecated|readOnly|writeOnly|content(Encoding|MediaType|Schema)"
    r"|\$(dynamicAnchor|recursiveAnchor|vocabulary)|x-.*"
)
_SCHEMA = re.compile(
    r"items|additionalItems|prefixItems|contains|additionalProperties|unevaluated(Items|Properties)|propertyNames"
    r"|allOf|anyOf|oneOf|not|if|then|else"
)
_BY_NAME = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"])
_EXACT = 2**53  # all integers up to this are exact as doubles, llguidance's number type
_FIRST, _LAST = -(2**63) + 1024, 2**63 - 1  # range of integers in llguidance
#: For the lower and for the upper bound: inclusive keyword, exclusive keyword, and direction into the range.
_BOUNDS = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))
_EVERYTHING: tuple[object, ...] = (True, {})
_NEUTRAL: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "uniqueItems": lambda value, _: value is False,
    "format": lambda value, _: value not in FORMATS,
    "propertyNames": lambda value, _: value in (*_EVERYTHING, {"type": "string"}),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), lambda value, _: value in _EVERYTHING),
    "not": lambda value, _: value is False or value == {"not": {}},
    "if": lambda _, schema: "then" not in schema and "else" not in schema,
    **dict.fromkeys(("then", "else"), lambda _, schema: "if" not in schema),
    "contains": lambda _, schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    "minContains": lambda value, schema: value == 0 or "contains" not in schema,
    "maxContains": lambda _, schema: "contains" not in schema,
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), lambda value, _: value == {}),
    "$id": lambda value, _: not isinstance(value, str) or any(map(str.isspace, value)),
    "$schema": lambda value, _: not str(value).startswith(("http://json-schema.org/", "https://json-schema.org/")),
}
# Keywords about further properties of an object.
_OPENING = frozenset(["additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties"])
# Keywords whose schemas apply to the same object as the properties beside them.
_COMBINING = frozenset(["allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas", "dependencies"])


class InexactError(Exception):
    """An integer in the schema cannot be enforced exactly."""


def normalized(schema: Any) -> Any:
    """Close the schema's objects and remove keywords without effect on the answer.

    An object that lists its properties has no others, unless `additionalProperties` allows them: so do OpenAI, vLLM
    and llama.cpp. If objects are combined (`allOf`, or a choice beside properties), all stay open, because the
    properties of one part are additional in the other. Raises InexactError for an integer that llguidance would round.
    """
    return _essential(schema, close=not any(map(_combines, _schemas(schema))))


def _combines(schema: dict[str, Any]) -> bool:
    every = schema.get("allOf")
    return ("properties" in schema and bool(schema.keys() & _COMBINING)) or (isinstance(every, list) and len(every) > 1)


def _lists_properties(schema: dict[str, Any]) -> bool:
    """Return whether the schema names all properties of its object, among them the required ones."""
    names, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(names, dict) or not isinstance(required, list) or schema.keys() & _OPENING:
        return False
    return all(name in names for name in required if isinstance(name, str))


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schema and all schemas inside, each as a dictionary of keywords."""
    if isinstance(schema, list):
        for item in cast("list[Any]", schema):
            yield from _schemas(item)
    if not isinstance(schema, dict):
        return
    keywords = cast("dict[str, Any]", schema)
    yield keywords
    for word, value in keywords.items():
        if word in _BY_NAME and isinstance(value, dict):
            yield from _schemas(list(cast("dict[str, Any]", value).values()))
        elif _SCHEMA.fullmatch(word):
            yield from _schemas(value)


def _essential(schema: Any, *, close: bool) -> Any:
    if isinstance(schema, list):
        return [_essential(item, close=close) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    keywords = cast("dict[str, Any]", schema)
    for word in ("const", "enum"):
        values = keywords.get(word)
        for value in cast("list[Any]", values) if isinstance(values, list) else [values]:
            if isinstance(value, int) and not (abs(value) < 2**63 and int(float(value)) == value):
                raise InexactError(f"{word}: {value} cannot be enforced exactly; use integers up to 2^53")
    if keywords.get("type") != "number":
        keywords = _with_exact_bounds(keywords)
    kept = {
        word: _inside(word, value, close=close)
        for word, value in keywords.items()
        if not _is_redundant(word, value, keywords)
    }
    return {**kept, "additionalProperties": False} if close and _lists_properties(keywords) else kept


def _with_exact_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Tighten integer bounds beyond 2^53 to the next double in range. Raises InexactError if no integer remains."""
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
        raise InexactError(f"the bound {limits[0]} cannot be enforced exactly; use integers up to 2^53")
    return inner


def _double_within(bound: int, step: int) -> int:
    """Return the first double from `bound` in the direction of `step`, within llguidance's range."""
    if not _FIRST < bound < _LAST:
        first = _LAST if step < 0 else _FIRST
        return first if (first - bound) * step >= 0 else bound
    near = float(bound)
    return int(near if (int(near) - bound) * step >= 0 else math.nextafter(near, step * math.inf))


def _is_integral(value: Any) -> TypeGuard[int | float]:
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _inside(word: str, value: Any, *, close: bool) -> Any:
    if word in _BY_NAME and isinstance(value, dict):
        return {name: _essential(item, close=close) for name, item in cast("dict[str, Any]", value).items()}
    return _essential(value, close=close) if _SCHEMA.fullmatch(word) else value


def _is_redundant(word: str, value: Any, schema: dict[str, Any]) -> bool:
    neutral = _NEUTRAL.get(word)
    return bool(_ANNOTATION.fullmatch(word)) or (neutral is not None and neutral(value, schema))
