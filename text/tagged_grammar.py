"""Grammars of tool calls in tags and in Gemma's notation, whose arguments obey the function's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..protocol.http.lenient_json import object_of, objects_of
from .grammars.compiler import inline_schema
from .tagged_calls import Schema, listed

_TYPED = frozenset(["type", "$ref", "allOf", "anyOf", "oneOf", "properties", "items"])
_OPEN = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties")  # keywords that may add properties


@dataclass(frozen=True, slots=True)
class TaggedGrammar:
    """Parts of a call in grammar notation. `{}` in `lead` and `key` stands for the function's and argument's name."""

    lead: str
    key: tuple[str, ...]
    # Text that ends a value.
    after: str
    between: str
    end: str
    # Name of the rule for whitespace that may separate the parts. Empty: whitespace is fixed.
    blanks: str = ""
    # Whether texts are quoted, and other values are in Gemma's notation.
    is_quoted: bool = False

    def call(self, name: str, parameters: Schema) -> str | None:
        """Return the grammar of a call; None if the schema does not list its arguments, or needs another notation."""
        arguments = self._arguments(parameters or {"properties": {}}, parameters)
        lead = json.dumps(self.lead.format(name))
        return None if arguments is None else _joined(lead, self.blanks, arguments, json.dumps(self.end))

    def rules(self, quote: str) -> list[str]:
        """Return the rules shared by the grammars of all calls. `quote`: Gemma's quotation mark as a grammar term."""
        rules = ["WS: /\\s*/", "ARGUMENT: /(.|\\n)*/", f"quote: {quote}"]
        if not self.is_quoted:
            return [*rules, f"free[lazy]: ARGUMENT {json.dumps(self.after)}"]
        if quote.startswith("<"):  # a special token, which no text contains
            return [*rules, "free: quote ARGUMENT quote"]
        return [*rules, "free: quote quoted", f"quoted[lazy]: ARGUMENT {quote}"]

    def _arguments(self, schema: Schema, root: Schema) -> str | None:
        """Return the grammar of required arguments in their order, followed by the optional ones."""
        properties, required = schema.get("properties"), {str(name) for name in listed(schema.get("required") or [])}
        is_open = schema.get("additionalProperties") not in (None, False) or any(word in schema for word in _OPEN)
        if not isinstance(properties, dict) or is_open or not required <= object_of(properties).keys():
            return None
        pairs = {name: self._pair(name, object_of(value), root) for name, value in object_of(properties).items()}
        if not all(pairs.values()):
            return None
        first = [pair for name, pair in pairs.items() if pair and name in required]
        optional = f"({' | '.join(pair for name, pair in pairs.items() if pair and name not in required)})"
        between = json.dumps(self.between) if self.between else ""
        more = "" if optional == "()" else f"({_joined(between, optional)})*"
        if first or not between:
            return _joined(f" {between} ".join(first), more)
        return more and f"({optional} {more})?"

    def _pair(self, name: str, schema: Schema, root: Schema) -> str | None:
        if (value := self._value(schema, root)) is None or not re.fullmatch(r"[\w.-]+", name):
            return None
        keys = _joined(*(part for piece in self.key for part in (json.dumps(piece.format(name)), self.blanks)))
        after = json.dumps(self.after) if self.after and value != "free" else ""
        return f"({_joined(keys.removesuffix(' WS'), value, after, self.blanks)})"

    def _value(self, schema: Schema, root: Schema) -> str | None:
        members = [schema, *(each for word in ("anyOf", "oneOf") for each in objects_of(schema.get(word)))]
        kinds = {str(kind) for each in members for kind in listed(each.get("type"))}
        if "enum" in schema or "const" in schema:
            return self._choices(listed(schema["enum"]) if "enum" in schema else [schema["const"]])
        if "string" in kinds or not schema.keys() & _TYPED:
            return "free"
        if not self.is_quoted:
            return inline_schema({name: root[name] for name in ("$defs", "definitions") if name in root} | {**schema})
        if kinds <= {"integer", "number", "boolean", "null"}:
            return inline_schema({**schema})
        if kinds == {"array"}:
            item = self._value(object_of(schema.get("items")), root)
            return item and f'"[" ({item} ("," {item})*)? "]"'
        arguments = self._arguments(schema, root) if kinds == {"object"} else None
        return None if arguments is None else _joined('"{"', arguments, '"}"')

    def _choices(self, values: Sequence[Any]) -> str | None:
        if not all(isinstance(value, str | int | float | None) for value in values):
            return None
        form = "quote {} quote" if self.is_quoted else "{}"
        texts = [json.dumps(value if isinstance(value, str) else json.dumps(value)) for value in values]
        shown = (
            form.format(text) if isinstance(value, str) else text for value, text in zip(values, texts, strict=True)
        )
        return f"({' | '.join(shown)})" if texts else None


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))


QWEN_GRAMMAR = TaggedGrammar("\n<function={}>\n", ("<parameter={}>\n",), "\n</parameter>\n", "", "</function>\n")
GLM_GRAMMAR = TaggedGrammar("{}", ("<arg_key>{}</arg_key>", "<arg_value>"), "</arg_value>", "", "", blanks="WS")
GEMMA_GRAMMAR = TaggedGrammar("call:{}{{", ("{}:",), "", ",", "}", is_quoted=True)
