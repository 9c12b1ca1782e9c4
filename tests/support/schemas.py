"""Random JSON schemas that resemble hand-written ones, for tests of structured output."""

from __future__ import annotations

import random
from typing import Any

FORMATS = ["date", "time", "date-time", "ipv4", "uuid", "email", "hostname"]
PATTERNS = ["^[a-z]{2,6}$", "^[A-Z]{3}-[0-9]{2,4}$", "^(yes|no|maybe)$", "^\\d{3}$", "^#[0-9a-f]{6}$", "^a+b*$", "ab"]
WORDS = ["red", "green", "blue", "grün", 'a "quoted" word', "日本", "back\\slash", "🙂", "", "tab\there"]


def random_schema(seed: int) -> dict[str, Any]:
    """Return a schema of bounded depth; the same for the same seed."""
    chance = random.Random(seed)
    schema = _object(chance, 3) if chance.random() < 0.7 else _any(chance, 3)
    if chance.random() < 0.1:
        return {"$defs": {"part": schema}, "type": "array", "maxItems": 3, "items": {"$ref": "#/$defs/part"}}
    return schema


def _any(chance: random.Random, depth: int) -> dict[str, Any]:
    leaves = [_string, _integer, _number, _enum, _boolean]
    makers = leaves if depth == 0 else [*leaves, _object, _object, _array, _any_of, _one_of, _all_of]
    return chance.choice(makers)(chance, depth - 1)


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(
        ["id", "name", "größe", "tags", "x-y", "value", "kind", 'q"uote', "n 1"], chance.randint(0, 5)
    )
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(chance, max(depth, 0)) for name in names},
        "required": [name for name in names if chance.random() < 0.6],
    }
    extra = chance.random()
    if extra < 0.7:
        schema["additionalProperties"] = False
    elif extra < 0.85:
        schema["additionalProperties"] = _any(chance, 0)
    return schema


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 3)
    schema: dict[str, Any] = {"type": "array", "items": _any(chance, max(depth, 0)), "minItems": least}
    schema["maxItems"] = least + chance.randint(0, 3)
    if chance.random() < 0.2:
        schema["prefixItems"] = [_any(chance, 0) for _ in range(chance.randint(1, 2))]
    return schema


def _string(chance: random.Random, depth: int) -> dict[str, Any]:
    kind = chance.random()
    if kind < 0.3:
        return {"type": "string", "pattern": chance.choice(PATTERNS)}
    if kind < 0.5:
        return {"type": "string", "format": chance.choice(FORMATS)}
    least = chance.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 12)}


def _integer(chance: random.Random, depth: int) -> dict[str, Any]:
    low = chance.randint(-1000, 1000)
    schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 5000)}
    if chance.random() < 0.2:
        schema = {"type": "integer", "multipleOf": chance.choice([2, 5, 7, 10]), "minimum": 0, "maximum": 1000}
    return schema


def _number(chance: random.Random, depth: int) -> dict[str, Any]:
    low = round(chance.uniform(-100, 100), chance.randint(0, 3))
    key_low, key_high = chance.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
    return {"type": "number", key_low: low, key_high: round(low + chance.uniform(0.5, 1000), 3)}


def _enum(chance: random.Random, depth: int) -> dict[str, Any]:
    values: list[Any] = [
        *chance.sample(WORDS, chance.randint(1, 4)),
        *chance.sample([1, -2.5, None, True, [1], {"a": 1}], 2),
    ]
    return {"enum": values} if chance.random() < 0.8 else {"const": chance.choice(values)}


def _boolean(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"type": chance.choice(["boolean", "null", ["boolean", "null"], ["integer", "string"]])}


def _any_of(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(chance, max(depth, 0)) for _ in range(chance.randint(1, 3))]}


def _one_of(chance: random.Random, depth: int) -> dict[str, Any]:
    """Return alternatives with different constants in the field `kind`, as in the tagged unions of typed languages."""
    options: list[dict[str, Any]] = []
    for kind in chance.sample(["circle", "square", "line"], chance.randint(1, 3)):
        option = _object(chance, max(depth, 0))
        option["properties"] = {
            "kind": {"const": kind},
            **{k: v for k, v in option["properties"].items() if k != "kind"},
        }
        option["required"] = ["kind", *(name for name in option["required"] if name != "kind")]
        options.append(option)
    return {"oneOf": options}


def _all_of(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"allOf": [_integer(chance, 0), {"minimum": chance.randint(-2000, 0)}]}
