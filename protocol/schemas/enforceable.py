"""Rewriter of JSON schemas: replaces keywords that grammars cannot enforce by keywords that grammars can enforce.

Rewrites constructs of pydantic and similar libraries: sets, dictionaries with constrained keys, decimals and UUID
versions. Other keywords that grammars cannot enforce are dropped with a note. A strict schema keeps them, and building
its grammar then fails with an error that names the keyword.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, TypeGuard, cast

#: JSON Schema keywords that grammars cannot enforce.
_UNENFORCED = frozenset(
    ("not", "propertyNames", "uniqueItems", "contains", "minContains", "maxContains", "if", "then", "else",
     "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties")
)  # fmt: skip
#: Formats that grammars enforce; other formats only describe the text.
FORMATS = frozenset(["date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"])
#: Keywords with these values make a schema unsatisfiable on purpose, so they are kept.
_IMPOSSIBLE: tuple[tuple[str, Any], ...] = (("not", {}), ("not", True))
_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_VALUES = frozenset({"const", "default", "enum", "example", "examples"})
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|(?<!\\)(?:\\\\)*\\[bB1-9]")
#: Patterns that replace the formats of UUID versions, and any of these formats in `propertyNames`.
_UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-%s[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"
_PATTERNS = {
    "date": "^[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$",
    "uuid": _UUID % "[1-8]",
    **{f"uuid{version}": _UUID % version for version in range(1, 9)},
}
_MAX_LISTS = 100  # maximum number of permutations that replace a set
_MAX_DIGITS = 100  # maximum digits of a decimal
#: Pydantic's lookahead patterns for Decimal, up to version 2.13, with or without limits on digits and places.
_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*"
    r"(?:\(\?:\\d\{0,(?P<whole>\d+)\}\|\(\?=\[\\d\.\]\{1,(?P<length>\d+)\}0\*\$\)"
    r"(?:\\d\{0,\d+\}\\\.\\d\{0,(?P<both>\d+)\}|\\d\*\\\.\\d\*)0\*\$\)"
    r"|\\d\*\\\.\?(?:\\d\{0,(?P<places>\d+)\}0)?(?:\\d)?\*\$)"
)


def enforceable(schema: dict[str, Any], notes: set[str], *, strict: bool) -> dict[str, Any]:
    """Rewrite a schema of limited depth; add dropped keywords to `notes`. Formats like `path` are always dropped."""
    return _SchemaRewriter(schema, notes, strict=strict).schema(schema)


class _SchemaRewriter:
    """Rewriter of one schema, which resolves references against `root`."""

    def __init__(self, root: dict[str, Any], notes: set[str], *, strict: bool) -> None:
        self._root, self._notes, self._strict = root, notes, strict

    def schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for word, value in self._in_known_words(schema).items():
            if word == "format" and isinstance(value, str) and value not in FORMATS:
                self._notes.add("format is ignored unless it is one of " + ", ".join(sorted(FORMATS)))
            elif word in _UNENFORCED and not self._strict and (word, value) not in _IMPOSSIBLE:
                self._notes.add(f"{word} is ignored")
            elif word == "pattern" and not self._strict and isinstance(value, str) and _LOOKS_AROUND.search(value):
                self._notes.add("pattern is ignored if it has lookaround or backreferences")
            elif word in _SCHEMAS_BY_NAME and isinstance(value, dict):
                entries = cast("dict[str, Any]", value).items()
                kept[word] = {name: self._value(entry) for name, entry in entries}
            else:
                kept[word] = value if word in _VALUES else self._value(value)
        return kept

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self.schema(cast("dict[str, Any]", value))
        if isinstance(value, list):
            return [self._value(item) for item in cast("list[Any]", value)]
        return value

    def _in_known_words(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Replace sets, constrained keys, decimals and UUID versions by keywords that grammars enforce."""
        if "uniqueItems" in schema:
            schema = self._set(schema)
        if "propertyNames" in schema and not schema.keys() & {"properties", "patternProperties"}:
            schema = self._keys(schema)
        pattern, form = schema.get("pattern"), schema.get("format")
        if isinstance(pattern, str) and (decimal := _decimal(pattern)) is not None:
            schema = {**schema, "pattern": decimal}
        if "pattern" not in schema and isinstance(form, str) and form in _PATTERNS and form not in FORMATS:
            schema = {**_without(schema, "format"), "pattern": _PATTERNS[form]}
        return schema

    def _set(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Rewrite `uniqueItems`: drop it if at most one item is allowed, or list all permutations of a few values."""
        rest = _without(schema, "uniqueItems")
        if schema["uniqueItems"] is False or (_is_count(most := schema.get("maxItems")) and most <= 1):
            return rest
        values = self._values(schema.get("items"))
        least, most = schema.get("minItems", 0), schema.get("maxItems", len(values))
        if schema.get("type") != "array" or not values or not _is_count(least) or not _is_count(most):
            return schema
        lists: list[tuple[Any, ...]] = []
        for length in range(least, min(most, len(values)) + 1):
            lists += itertools.islice(itertools.permutations(values, length), _MAX_LISTS + 1 - len(lists))
        if not 0 < len(lists) <= _MAX_LISTS:
            return schema
        return {**_without(rest, "type", "items", "minItems", "maxItems"), "anyOf": [_list(each) for each in lists]}

    def _keys(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Rewrite `propertyNames` (enumeration, pattern, format or length) as `properties` or `patternProperties`."""
        rest = _without(schema, "propertyNames")
        names, value = self._resolved(schema["propertyNames"]), rest.get("additionalProperties", True)
        listed = [name for name in self._values(names) if isinstance(name, str)]
        if listed:
            return {**rest, "properties": dict.fromkeys(listed, value), "additionalProperties": False}
        words = set(names) - {"type", "title", "description"}
        least, most = names.get("minLength", 0), names.get("maxLength")
        if words == {"pattern"} and isinstance(names["pattern"], str):
            pattern = names["pattern"]
        elif words == {"format"} and names["format"] in _PATTERNS:
            pattern = _PATTERNS[names["format"]]
        elif words and words <= {"minLength", "maxLength"} and _is_count(least) and (most is None or _is_count(most)):
            pattern = f"^(?s:.){{{least},{'' if most is None else most}}}$"
        else:
            return schema
        return {**rest, "patternProperties": {pattern: value}, "additionalProperties": False}

    def _values(self, schema: Any) -> list[Any]:
        """Return the values that a schema enumerates; empty if the schema allows other values."""
        target = self._resolved(schema)
        if target.get("type") == "boolean" and "enum" not in target and "const" not in target:
            return [False, True]
        listed: Any = target.get("enum", [target["const"]] if "const" in target else [])
        values = cast("list[Any]", listed) if isinstance(listed, list) else []
        return list({json.dumps(value, sort_keys=True): value for value in values}.values())

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """Follow `$ref`s to a schema within the root; return an empty schema if the target is not an object."""
        for _ in range(8):
            target = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
            reference: Any = target.get("$ref")
            if not isinstance(reference, str) or not reference.startswith("#/"):
                return target
            schema = self._root
            for part in reference[2:].split("/"):
                inner = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
                schema = inner.get(part.replace("~1", "/").replace("~0", "~"))
        return {}


def _without(schema: dict[str, Any], *words: str) -> dict[str, Any]:
    return {word: value for word, value in schema.items() if word not in words}


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _list(values: tuple[Any, ...]) -> dict[str, Any]:
    if not values:
        return {"type": "array", "maxItems": 0}
    items = [{"const": value} for value in values]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(values)}


def _decimal(pattern: str) -> str | None:
    """Rewrite pydantic's Decimal pattern without lookahead; None for other patterns."""
    match = _DECIMAL.fullmatch(pattern)
    if match is None:
        return None
    whole, length, both, places = (None if text is None else int(text) for text in match.groups())
    if max(whole or 0, both or 0, places or 0) > _MAX_DIGITS:
        return None
    if whole is not None and both is None:
        forms = [_digits(1, whole), *(rf"{_digits(n, n)}\.{_digits(1, whole - n)}" for n in range(whole))]
    else:
        places = places if both is None else min(both, int(length or 1) - 1)
        forms = [] if whole == 0 else [rf"{_digits(1, whole)}(\.{_digits(0, places)})?"]
        forms += [] if places == 0 else [rf"0?\.{_digits(1, places)}"]
    return f"^[+-]?({'|'.join(forms or ['0'])})$"


def _digits(least: int, most: int | None) -> str:
    return f"[0-9]{{{least},{'' if most is None else most}}}"
