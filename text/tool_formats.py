"""Tool-call formats of model families: detection of a model's format, and grammars that enforce it."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, get_args

from ..protocol.errors import ConfigurationError
from ..protocol.schemas.enforceable import enforceable
from ..protocol.structured import Constraint, Function, NamedTool, ToolUse
from .chat import ChatTemplate
from .control_tokens import HasSpecialTokens, marks_of
from .grammars.compiler import inline, inline_schema
from .tagged_calls import GEMMA, GLM, QUOTE, QWEN, Schema, TaggedCallParser
from .tagged_grammar import GEMMA_GRAMMAR, GLM_GRAMMAR, QWEN_GRAMMAR
from .tool_calls import FormatName, ToolCallParser, ToolSyntax

_TAGGED = {
    "qwen3_coder": (QWEN, QWEN_GRAMMAR),
    "glm45": (GLM, GLM_GRAMMAR),
    "gemma4": (GEMMA, GEMMA_GRAMMAR),
}
_ANY_OBJECT = {"type": "object"}
_ANY_TEXT = r"/(.|\n)*/"


class ModelText(HasSpecialTokens, Protocol):
    """Interface of a model in whose chat template the tool-call format is detected."""

    @property
    def chat_template(self) -> ChatTemplate | None: ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Tool-call format. `hermes` (also Qwen): `<tool_call>{json}</tool_call>`. `llama3`: plain JSON. `mistral`:
    `[TOOL_CALLS]` and a JSON list. `mistral-args` (newer models): `[TOOL_CALLS]name[ARGS]{json}`, in some models with
    `[CALL_ID]` after the name. `qwen3_coder` (Qwen 3.8, Nemotron 3), `glm45` (Laguna) and `gemma4`: see `tagged_calls`.

    `marks` are the format's special tokens, as id -> text; parsers need their text in the decoded answer.
    """

    name: FormatName
    syntax: ToolSyntax
    marks: dict[int, str]

    @staticmethod
    def of(tool_call_parser: str, model: ModelText) -> ToolFormat | None:
        """Return the named format, or detect the model's if "auto". Raises ConfigurationError for an unknown name."""
        return ToolFormat.detected(model) if tool_call_parser == "auto" else ToolFormat.named(tool_call_parser, model)

    @staticmethod
    def named(name: str, model: ModelText) -> ToolFormat:
        """Return the format of this name. Raises ConfigurationError for an unknown name."""
        if name in ("hermes", "qwen3_coder", "glm45"):
            syntax = ToolSyntax("<tool_call>", "</tool_call>")
        elif name == "gemma4":
            syntax = ToolSyntax("<|tool_call>", "<tool_call|>")
        elif name == "llama3":
            syntax = ToolSyntax("<|python_tag|>", bare=True)
        elif name in ("mistral", "mistral-args"):
            syntax = ToolSyntax("[TOOL_CALLS]", lists=True)
        else:
            raise ConfigurationError(
                f"tool_call_parser must be {', '.join(get_args(FormatName))} or auto, got {name!r}.",
                param="tool_call_parser",
            )
        marks = marks_of(model, (syntax.opener, syntax.closer, "[CALL_ID]", "[ARGS]", QUOTE))
        return ToolFormat(name, syntax, marks)

    @staticmethod
    def detected(model: ModelText) -> ToolFormat | None:
        """Detect the format in the model's chat template; None if there is no tool support or an unknown format."""
        template = "" if model.chat_template is None else model.chat_template.tool_source
        if "[TOOL_CALLS]" in template:
            name = "mistral-args" if "[ARGS]" in template else "mistral"
        elif "<function=" in template:  # "functionary" models write JSON after this mark, which is not supported
            name = "qwen3_coder" if "<parameter=" in template else None
        elif "<|tool_call>" in template:
            name = "gemma4"
        elif "<arg_key>" in template:
            name = "glm45"
        elif ("<tool_call>" in template and '"arguments": ' in template) or "named SmolLM" in template:
            name = "hermes"  # SmolLM2 was trained on this format, although its template has no tools
        elif "ipython" in template and '"parameters": ' in template:
            name = "llama3"
        else:
            name = None
        return name and ToolFormat.named(name, model)

    def parser(self, schemas: Mapping[str, Schema]) -> ToolCallParser:
        """Return a parser for one answer. `schemas`: JSON schemas of the declared functions' arguments, by name."""
        if (tagged := _TAGGED.get(self.name)) is None:
            return ToolCallParser(self.syntax, schemas)
        return TaggedCallParser(self.syntax, schemas, tagged[0])

    def new_call_id(self) -> str:
        """Create a call id. Mistral's templates accept only nine letters and digits."""
        if self.syntax.lists:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def constraint(self, use: ToolUse, text: Constraint | None = None) -> Constraint | None:
        """Return the grammar of an answer: only calls if `tool_choice` requires a call, else text and valid calls.

        With a constraint on `text`, an answer either matches the constraint or consists of calls. Returns None if any
        answer is allowed, because `tool_choice` is `auto`, no function is `strict` and the text is free.
        """
        functions, choice, parallel = [tool.function for tool in use.tools], use.choice, use.parallel
        if isinstance(choice, NamedTool):
            functions = [function for function in functions if function.name == choice.function.name]
            return self._constraint("start: calls", functions, parallel=False)
        if choice == "required":
            return self._constraint("start: calls", functions, parallel=parallel)
        if text is None and not any(function.strict for function in functions):
            return None
        functions = [_relaxed(function) for function in functions]
        if text is None:
            return self._constraint(self._text_or_calls(parallel), functions, parallel=parallel)
        start = f"start: text | calls\ntext: {inline(text)}"
        combined = self._constraint(start, functions, parallel=parallel)
        return replace(combined, param=text.param, notes=(*text.notes, *combined.notes))

    def _constraint(self, start: str, functions: Sequence[Function], *, parallel: bool) -> Constraint:
        calls = "call" if self.syntax.bare else self._calls(parallel)  # llama3 allows one call per message
        notes = set[str]()
        functions = [_enforceable(function, notes) for function in functions]
        rules = [start, f"calls: {calls}", "call: " + " | ".join(f"call_{index}" for index in range(len(functions)))]
        called = [self._call(function) for function in functions]
        rules += [f"call_{index}: {call}" for index, call in enumerate(called)]
        if any(call.endswith(" unchecked") for call in called):
            notes.add("tools: the model's format for calls leaves arguments unchecked")
            rules += self._unchecked()
        if self.name in _TAGGED:
            texts = json.dumps([function.parameters for function in functions])
            if re.search('"(pattern|format|minLength|maxLength)": ', texts):
                notes.add("tools: the model's format for calls leaves patterns and lengths of texts unchecked")
            rules += _TAGGED[self.name][1].rules(self._mark(QUOTE))
        return Constraint("lark", "\n".join(rules), "tools", tuple(sorted(notes)))

    def _calls(self, parallel: bool) -> str:
        one = f"{self._mark(self.syntax.opener)} {self._body(parallel)}"
        if not parallel or self.name == "mistral":
            return one
        return f'{one} ("\\n" {one})*' if self.name in ("hermes", "qwen3_coder") else f"({one})+"

    def _body(self, parallel: bool) -> str:
        """Return the grammar of the text after the opener."""
        if self.name == "hermes":
            return f'"\\n" call "\\n" {self._mark(self.syntax.closer)}'
        if self.name == "mistral":
            return '"[" call (", " call)* "]"' if parallel else '"[" call "]"'
        return "call"

    def _call(self, function: Function) -> str:
        if tagged := _TAGGED.get(self.name):
            if (checked := tagged[1].call(function.name, function.parameters or {})) is not None:
                return f"{checked} {self._mark(self.syntax.closer)}"
            lead = {"qwen3_coder": "\n<function={}>", "gemma4": "call:{}{{"}.get(self.name, "{}")
            return f"{json.dumps(lead.format(function.name))} unchecked"
        none = {"properties": {}, "additionalProperties": False}
        arguments = {**_ANY_OBJECT, **(function.parameters or none)}
        if self.syntax.bare:  # a grammar of one JSON value, because an answer in JSON may begin like a call
            fields = {"name": {"const": function.name}, "parameters": _moved(arguments, "/properties/parameters")}
            return inline_schema({"properties": fields, "required": list(fields), **_ANY_OBJECT})
        if self.name == "mistral-args":
            return f"{json.dumps(function.name)} {self._mark('[ARGS]')} {inline_schema(arguments)}"
        opening = f'{{"name": "{function.name}", "arguments": '
        return f'{json.dumps(opening)} {inline_schema(arguments)} "}}"'

    def _unchecked(self) -> list[str]:
        """Return the rules for the arguments and the end of a call in tags."""
        closer, end = self.syntax.closer, {"qwen3_coder": "</function>\n", "gemma4": "}"}.get(self.name, "")
        rules = ["ANY: /\\s*(<arg_key>(.|\\n)*)?/" if self.name == "glm45" else "ANY: /(.|\\n)*/"]
        if closer not in self.marks.values():
            return [*rules, f"unchecked[lazy]: ANY {json.dumps(end + closer)}"]
        quoted = f"({self._mark(QUOTE)} ANY)*" if QUOTE in self.marks.values() else ""
        return [*rules, f"unchecked: ANY {quoted} {self._mark(closer)}"]

    def _text_or_calls(self, parallel: bool) -> str:
        opener = self.syntax.opener
        if self.syntax.bare:
            return "start: TEXT | calls\nTEXT: /(\\s*[^{\\s](.|\\n)*)?/"
        if opener in self.marks.values():
            return f"start: TEXT | TEXT calls\nTEXT: {_ANY_TEXT}"
        start = f"start: (head {self._body(parallel)})* TEXT" if parallel else f"start: TEXT | head {self._body(False)}"
        return f"{start}\nTEXT: {_ANY_TEXT}\nhead[lazy]: TEXT {json.dumps(opener)}"

    def _mark(self, text: str) -> str:
        """Return a marker in grammar notation: as a special token if the model has one, else as text."""
        for token_id, mark in self.marks.items():
            if mark == text:
                return f"<[{token_id}]>"
        return json.dumps(text)


def _moved(schema: Any, pointer: str) -> Any:
    """Adapt the references of a schema that moves from the root to this JSON pointer."""
    if isinstance(schema, list):
        return [_moved(item, pointer) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    moved = {word: _moved(value, pointer) for word, value in cast("dict[str, Any]", schema).items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#{pointer}{reference[1:]}"
    return moved


def _enforceable(function: Function, notes: set[str]) -> Function:
    """Return the function with parameters that a grammar can enforce."""
    parameters = enforceable(function.parameters or {}, notes, strict=function.strict is True)
    return Function(function.name, parameters=parameters or None)


def _relaxed(function: Function) -> Function:
    """Relax a function for optional calls: unless it is strict, any object is allowed as arguments."""
    return function if function.strict else Function(function.name, parameters=_ANY_OBJECT)
