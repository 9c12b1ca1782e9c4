"""Request types for constrained answers: `response_format`, `structured_outputs` and `tools`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

import msgspec

from .errors import UnsupportedFeatureError, invalid_value
from .hints import EFFORTS, HINTS, member, object_of
from .schemas.enforceable import enforceable

MAX_CONSTRAINT_CHARS = 2**17
MAX_TOOLS = 128
MAX_DEPTH = 64
#: Fields of tools that have no effect here. Cache hints are so common that they get no note.
TOOL_HINTS = ("allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples")
_TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
ConstraintKind = Literal["json_schema", "regex", "choice", "lark", "gbnf"]
#: Kinds of constraints by the field of `structured_outputs`.
_KINDS: dict[str, ConstraintKind] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """Grammar that the answer must match. Holds only text, so it can be sent to other processes and used as a key."""

    kind: ConstraintKind
    # A JSON schema, a regular expression, a JSON list of choices, or a Lark or GBNF grammar, according to `kind`.
    source: str
    # Request field that the constraint came from, for error messages.
    param: str
    # Parts of the schema that cannot be enforced.
    notes: tuple[str, ...] = ()


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """JSON schema of `response_format`. `strict`: refuse a schema that cannot be fully enforced."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: exactly one of a JSON schema, a regex, a list of answers, or a Lark grammar."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Function that the model may call. `parameters` is a JSON schema; None: the function has no parameters."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    function: FunctionName
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that an answer may call. `choice` None means "auto"; `parallel` allows several calls in one answer."""

    tools: list[Tool]
    choice: ToolChoice | None = None
    parallel: bool = True


class _ChatOptions(TypedDict, total=False):
    # Continue the last message instead of starting a new one.
    continue_final_message: bool
    # Variables for the chat template; the template may output them as control tokens.
    template_options: Mapping[str, Any] | None


class AnswerOptions(_ChatOptions, total=False):
    """Options for answering a chat with a local model."""

    tools: ToolUse | None
    constraint: Constraint | None
    # Reasoning effort, which models may ignore.
    effort: str | None


class RenderOptions(_ChatOptions, total=False):
    """Options for rendering a chat template."""

    tools: Sequence[Tool]
    # Append the opening of the assistant's answer; true by default.
    add_generation_prompt: bool


class CalledFunction(msgspec.Struct):
    """Function name and arguments of a tool call. `arguments` is the JSON text exactly as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


def format_constraint(wanted: ResponseFormat) -> Constraint | None:
    """Return the constraint of a `response_format`; None for plain text. Raises InvalidRequestError."""
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        fault = 'json_schema is required for type "json_schema" and not allowed otherwise'
        raise invalid_value("response_format", fault)
    if wanted.json_schema is not None:
        schema, param, notes = wanted.json_schema.schema, "response_format", set[str]()
        _check_depth(schema, param)
        text = _encoded(enforceable(schema, notes, strict=wanted.json_schema.strict is True), param)
        return Constraint("json_schema", checked_source(text, param), param, tuple(sorted(notes)))
    return None if wanted.type == "text" else Constraint("json_schema", '{"type":"object"}', "response_format")


def outputs_constraint(wanted: StructuredOutputs) -> Constraint:
    """Return the constraint of `structured_outputs`. Raises InvalidRequestError unless exactly one kind is given."""
    param, names = "structured_outputs", wanted.__struct_fields__
    given = [name for name in names if getattr(wanted, name) is not None]
    if len(given) != 1:
        raise invalid_value(param, f"give exactly one of {', '.join(names)}, got {given or 'none'}")
    if wanted.choice is not None and not (wanted.choice and all(wanted.choice)):
        raise invalid_value(param, "choice must be a list of non-empty answers")
    value: Any = getattr(wanted, given[0])
    source = value if isinstance(value, str) else _encoded(value, param)
    return Constraint(_KINDS[given[0]], checked_source(source, param), param)


def function_tools(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a chat request whose tools are only the functions that the answer may call; without functions, the fields
    of tools are left out. A `tool_choice` of type `allowed_tools` becomes its mode, `auto` or `required`. Raises
    InvalidRequestError if no function can be chosen."""
    tools: Any = fields.get("tools") or []
    choice = fields.get("tool_choice")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in cast("list[Any]", tools)):
        return fields
    given = cast("list[dict[str, Any]]", tools)
    kept = [_without_hints(tool) for tool in given if (tool.get("type") or "function") == "function"]
    if isinstance(choice, dict):
        chosen = cast("dict[str, Any]", choice)
        if chosen.get("type") == "allowed_tools":
            kept, choice = _allowed(chosen, kept)
        elif (chosen.get("type") or "function") != "function":
            raise no_such_tool(chosen.get("type"))
    if kept:
        return {**fields, "tools": kept, "tool_choice": choice}
    if choice not in (None, "auto", "none"):
        raise invalid_value("tool_choice", "there are no functions to choose from: give tools of type function")
    return {name: value for name, value in fields.items() if name not in _TOOL_FIELDS}


def _without_hints(tool: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in tool.items() if name not in TOOL_HINTS}
    return {**plain, "function": _without_hints(plain["function"])} if _name_of(plain) else plain


def check_functions(tools: Any) -> None:
    """Raise InvalidRequestError, naming the tool, for a tool of type function without a function and its name."""
    for index, tool in enumerate(cast("list[Any]", tools) if isinstance(tools, list) else ()):
        if (member(tool, "type") or "function") == "function" and not isinstance(_name_of(tool), str):
            raise invalid_value(f"tools[{index}]", "a tool of type function needs the object `function` with a name")


def _allowed(choice: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the functions that `choice` allows, and its mode, `auto` or `required`. Raises InvalidRequestError."""
    allowed = object_of(choice.get("allowed_tools"))
    mode, listed = allowed.get("mode"), allowed.get("tools")
    given = cast("list[Any]", listed) if isinstance(listed, list) else []
    names = [_name_of(tool) for tool in given if member(tool, "type") == "function"]
    kept = [tool for tool in tools if _name_of(tool) in names]
    if mode not in ("auto", "required") or not kept or len(kept) < len(names):
        fault = "allowed_tools needs a mode, auto or required, and functions that are among the tools"
        raise invalid_value("tool_choice", fault)
    return kept, mode


def no_such_tool(kind: Any) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"tool_choice: no model here can call {str(kind)[:100]!r}. Use functions.", param="tool_choice"
    )


def tool_notes(tools: Any, functions: Sequence[str | None] = ("function",)) -> list[str]:
    """Return notes on tools that are left out, because their type is not in `functions`, and on functions' hints."""
    notes: list[str] = []
    for index, tool in enumerate(cast("list[Any]", tools) if isinstance(tools, list) else ()):
        if (kind := member(tool, "type")) not in functions:
            notes.append(f"tools[{index}]: left out, {str(kind)[:100]!r} is a tool of a vendor's servers")
        else:
            given = [name for name in TOOL_HINTS if member(tool, name) and name != "cache_control"]
            notes += [f"tools[{index}].{name}: no effect" for name in given]
    return notes


def ignored(
    fields: Mapping[str, Any], used: Sequence[str] = (), names: Mapping[str, str] | None = None, *, reasons: bool = True
) -> tuple[str, ...]:
    """Return notes on hints and tools that have no effect, except the fields in `used`. `names`: the caller's names.

    `reasons`: whether the model is asked to reason. If not, the fields of the reasoning effort are noted too.
    """
    hints = [name for name in (*HINTS, *(() if reasons else EFFORTS)) if fields.get(name) is not None]
    given = [(names or {}).get(name, name) for name in hints if name not in used]
    return (*((f"{', '.join(given)}: no effect",) if given else ()), *tool_notes(fields.get("tools")))


def _name_of(tool: Any) -> Any:
    return member(member(tool, "function"), "name")


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None = None) -> None:
    """Check tools and `tool_choice` against each other. Raises InvalidRequestError."""
    if len(tools) > MAX_TOOLS:
        raise invalid_value("tools", f"give at most {MAX_TOOLS} tools, got {len(tools)}")
    if any(depth_of(tool.function.parameters) > MAX_DEPTH for tool in tools):
        raise invalid_value("tools", f"a function's parameters are nested deeper than {MAX_DEPTH} levels")
    names = [tool.function.name for tool in tools]
    for name in itertools.filterfalse(_TOOL_NAME.fullmatch, names):
        fault = f"a function's name must be 1 to 128 letters, digits, '_', '-' or '.', got {name[:100]!r}"
        raise invalid_value("tools", fault)
    if len(set(names)) < len(names):
        raise invalid_value("tools", "two functions have the same name")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid_value("tool_choice", f"there is no function {choice.function.name!r} among the tools")


def depth_of(value: Any) -> int:
    """Return the nesting depth of lists and objects in decoded JSON."""
    depth, level = 0, _children([value])
    while level:
        depth += 1
        level = [child for item in level for child in _children(item)]
    return depth


def _children(value: Any) -> list[Any]:
    items = cast("Iterable[Any]", value.values() if isinstance(value, dict) else value)
    return [item for item in items if isinstance(item, list | dict)]


def _check_depth(schema: Any, param: str) -> None:
    if depth_of(schema) > MAX_DEPTH:
        raise invalid_value(param, f"the schema is nested deeper than {MAX_DEPTH} levels")


def _encoded(value: Any, param: str) -> str:
    _check_depth(value, param)
    return msgspec.json.encode(value).decode()


def checked_source(source: str, param: str) -> str:
    """Return the source of a constraint. Raises InvalidRequestError if the source is too long."""
    if len(source) > MAX_CONSTRAINT_CHARS:
        raise invalid_value(param, f"the constraint has more than {MAX_CONSTRAINT_CHARS} characters")
    return source
