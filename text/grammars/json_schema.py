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

from ...protocol.http.lenient_json import object_of, objects_of
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
# Keywords about properties of an object that `properties` does not list.
_OPENING = frozenset(["additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties"])
# Keywords whose subschemas describe the same object as the `properties` beside them.
_CONDITIONS = frozenset(["$dynamicRef", "if", "dependentSchemas", "dependencies"])
_COMBINING = _CONDITIONS | {"allOf", "anyOf", "oneOf", "$ref"}
_UNLISTED = _CONDITIONS | _OPENING


class InexactError(Exception):
    """An integer in the schema cannot be enforced exactly."""


def normalized(schema: Any) -> Any:
    """Close the schema's objects and remove keywords without effect on the answer.

    As in OpenAI, vLLM and llama.cpp, an object that lists its properties allows no others without
    `additionalProperties`. If several schemas describe one object (`allOf`, or `anyOf` beside `properties`), each may
    use the properties of all. Raises InexactError for an integer that llguidance would round.
    """
    return _essential(schema, _CombinedObjects(schema))


class _CombinedObjects:
    """Objects that several schemas describe together, such as `allOf`, or `anyOf` beside `properties`.

    `names`: all property names of such an object, by the `id()` of its outermost schema. `open`: the `id()` of each
    schema that must stay open, because it describes only a part of an object, or an object with unknown properties.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self.open, self.names = set[int](), dict[int, list[str]]()
        for schema in _schemas(root):
            every = schema.get("allOf")
            is_split = isinstance(every, list) and len(cast("list[Any]", every)) > 1
            if is_split or ("properties" in schema and schema.keys() & _COMBINING):
                self._add(schema)
        self.names = {key: names for key, names in self.names.items() if key not in self.open}

    def _add(self, schema: dict[str, Any]) -> None:
        parts: dict[int, dict[str, Any]] = {}
        self._collect(schema, parts)
        self.open |= parts.keys() - {id(schema)}
        names = {name: {} for part in parts.values() for name in object_of(part.get("properties"))}
        is_listed = not any(part.keys() & _UNLISTED for part in parts.values())
        wholes = ({"properties": names, "required": part.get("required", [])} for part in parts.values())
        if names and is_listed and all(map(_lists_properties, wholes)):
            self.names[id(schema)] = list(names)
        else:
            self.open.add(id(schema))

    def _collect(self, schema: Any, parts: dict[int, dict[str, Any]]) -> None:
        """Add a schema to `parts`, and every schema that describes the same object."""
        if not isinstance(schema, dict) or id(schema) in parts:
            return
        keywords = parts[id(schema)] = cast("dict[str, Any]", schema)
        for part in (part for word in ("allOf", "anyOf", "oneOf") for part in objects_of(keywords.get(word))):
            self._collect(part, parts)
        if "$ref" in keywords:
            self._collect(self._referred(str(keywords["$ref"])), parts)

    def _referred(self, reference: str) -> Any:
        """Return the schema at the `$ref` value `reference`, or a schema with unknown properties if not in the root."""
        schema, unknown = self._root, {"unevaluatedProperties": True}
        for step in reference.removeprefix("#").split("/")[1:]:
            schema = object_of(schema).get(step.replace("~1", "/").replace("~0", "~"), unknown)
        return schema if reference.startswith("#") else unknown


def _lists_properties(schema: dict[str, Any]) -> bool:
    """Return whether `properties` names all properties of the schema's object, including the required ones."""
    names, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(names, dict) or not isinstance(required, list) or schema.keys() & _OPENING:
        return False
    return all(name in names for name in required if isinstance(name, str))


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schema and all schemas nested in it, each as a dictionary of keywords."""
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


def _essential(schema: Any, combined: _CombinedObjects) -> Any:
    if isinstance(schema, list):
        return [_essential(item, combined) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    keywords, key = cast("dict[str, Any]", schema), id(cast("object", schema))
    for word in ("const", "enum"):
        values = keywords.get(word)
        for value in cast("list[Any]", values) if isinstance(values, list) else [values]:
            if isinstance(value, int) and not (abs(value) < 2**63 and int(float(value)) == value):
                raise InexactError(f"{word}: {value} cannot be enforced exactly; use integers up to 2^53")
    if keywords.get("type") != "number":
        keywords = _with_exact_bounds(keywords)
    kept = {
        word: _inside(word, value, combined)
        for word, value in keywords.items()
        if not _is_redundant(word, value, keywords)
    }
    if (names := combined.names.get(key)) is not None:
        kept["properties"] = {name: object_of(kept.get("properties")).get(name, {}) for name in names}
    elif key in combined.open or not _lists_properties(keywords):
        return kept
    return {**kept, "additionalProperties": False}


def _with_exact_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Move integer bounds beyond 2^53 to the next double within them. Raises InexactError if no integer remains."""
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


def _inside(word: str, value: Any, combined: _CombinedObjects) -> Any:
    if word in _BY_NAME and isinstance(value, dict):
        return {name: _essential(item, combined) for name, item in cast("dict[str, Any]", value).items()}
    return _essential(value, combined) if _SCHEMA.fullmatch(word) else value


def _is_redundant(word: str, value: Any, schema: dict[str, Any]) -> bool:
    neutral = _NEUTRAL.get(word)
    return bool(_ANNOTATION.fullmatch(word)) or (neutral is not None and neutral(value, schema))
