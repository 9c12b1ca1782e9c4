"""Parser of tool calls that are written in tags, or in Gemma's notation, instead of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ..protocol.http.lenient_json import object_of
from .detokenize import begun_mark
from .tool_calls import CallDelta, ParsedText, ToolCallParser, ToolSyntax

_PARAMETER = re.compile(
    r"<parameter=([^>]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=[^>\n]+>\n)|(?=</function>\s*\Z))", re.DOTALL
)
_PAIR = re.compile(r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
QUOTE = '<|"|>'
_PIECE = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<json>"(?:[^"\\]|\\.)*+"|[{}\[\],:]|\s+)|(?P<word>[^{}\[\],:<"\s]+)', re.DOTALL
)
_NAME = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_SCALAR = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_WORDS = {"True": True, "False": False, "None": None}
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TaggedSyntax:
    """Notation of one call, after the opener and before the closer."""

    # Text before the function's name.
    before_name: str
    # Last text of a complete call. A closer without this text before it belongs to an argument.
    end: str
    # Reader of the text after the name: returns the arguments by name, or None if malformed.
    arguments: Callable[[str, Schema], dict[str, Any] | None]

    def call(self, body: str, schemas: Mapping[str, Schema]) -> tuple[str, str] | None:
        """Return name and JSON arguments of a declared function; None for any other text."""
        if not (body := body.strip()).startswith(self.before_name):
            return None
        name = _name(body := body.removeprefix(self.before_name))
        if name not in schemas:
            return None
        arguments = self.arguments(body[len(name) :].strip(), object_of(schemas[name].get("properties")))
        return None if arguments is None else (name, json.dumps(arguments, ensure_ascii=False))

    def is_complete(self, body: str) -> bool:
        return ("<" not in body or body.rstrip().endswith(self.end)) and body.count(QUOTE) % 2 == 0


class TaggedCallParser(ToolCallParser):
    """Parser that emits each call only when complete, also calls in JSON. `schemas`: of arguments, by function."""

    def __init__(self, syntax: ToolSyntax, schemas: Mapping[str, Schema], tagged: TaggedSyntax) -> None:
        super().__init__(syntax, schemas)
        self._schemas = schemas
        self._tagged = tagged
        self._parts: list[str] = []  # text of the current call so far

    def flush(self) -> ParsedText:
        if self._parts:
            body = "".join([*self._parts, self._buffer])
            self._buffer = ""
            self._finish(body, "", is_complete=self._tagged is not GLM and self._tagged.is_complete(body))
        return super().flush()

    def _opened(self) -> bool:
        if not self._parts:
            rest, lead = self._buffer.lstrip(), self._tagged.before_name
            if rest.startswith("{") or not rest.startswith(lead[: len(rest)]):
                return super()._opened()
            name = _name(rest[len(lead) :])
            if len(rest) <= len(lead) + len(name):
                return False  # more of the name may follow
            if name not in self._schemas:
                return self._back_to_text()
        body, closer, rest = self._buffer.partition(self._syntax.closer)
        if not closer:
            end = len(body) - begun_mark(body, (self._syntax.closer,))
            self._parts += [body[:end]] if end else []
            self._buffer = body[end:]
            return False
        whole, self._buffer = "".join([*self._parts, body]), rest
        self._parts = [whole, closer]
        return not self._tagged.is_complete(whole) or self._finish(whole, closer, is_complete=True)

    def _finish(self, body: str, closer: str, *, is_complete: bool) -> bool:
        self._parts = []
        call = self._tagged.call(body, self._schemas) if is_complete else None
        if call is None:
            self._opening += body + closer
            return self._back_to_text()
        self._parsed.calls += [CallDelta(self.num_calls, call[0]), CallDelta(self.num_calls, arguments=call[1])]
        self.num_calls += 1
        self._called, self._state = True, self._after_call
        return True


def _name(text: str) -> str:
    """Return the function's name at the start of `text`."""
    return cast("re.Match[str]", _NAME.match(text))[0]


def _typed(pairs: Iterator[tuple[str, str]], properties: Schema) -> dict[str, Any]:
    return {name: _value(text, object_of(properties.get(name))) for name, text in pairs}


def _value(text: str, schema: Schema) -> Any:
    """Return the value of an argument written without quotes: text if the schema allows strings, else JSON."""
    members = [schema, *map(object_of, schema.get("anyOf") or schema.get("oneOf") or ())]
    types = {kind for each in members for kind in listed(each.get("type"))}
    if text in listed(schema.get("enum")) or ("string" in types and not (text == "null" and "null" in types)):
        return text
    try:
        return _WORDS[text] if text in _WORDS else json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def _refuse(constant: str) -> Any:
    raise ValueError(constant)  # JSON has no NaN and no Infinity


def _of_gemma(text: str, _: Schema) -> dict[str, Any] | None:
    """Read `{key:<|"|>text<|"|>,other:[1,true]}`."""
    written: list[str] = []
    start = 0
    while match := _PIECE.match(text, start):
        start = match.end()
        is_key = text.startswith(":", start)
        plain = match["json"] or (not is_key and match["word"] and _SCALAR.fullmatch(match["word"]) and match["word"])
        written.append(plain or json.dumps(match["text"] if match["word"] is None else match["word"]))
    try:
        arguments = json.loads("".join(written)) if start == len(text) else None
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else None


QWEN = TaggedSyntax(
    "<function=", "</function>", lambda text, properties: _typed(iter(_PARAMETER.findall(text)), properties)
)
GLM = TaggedSyntax("", "</arg_value>", lambda text, properties: _typed(iter(_PAIR.findall(text)), properties))
GEMMA = TaggedSyntax("call:", "}", _of_gemma)
