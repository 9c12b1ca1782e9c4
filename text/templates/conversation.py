"""Conversations as input of chat templates, with adaptations for templates that do not support all kinds of input.

Some templates do not support the roles `developer` or `system`, some require alternating turns, some read only lists of
content parts, some do not support tools. `Conversation.fits` yields adaptations in a fixed order, the smallest first.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import msgspec

from ...protocol.requests import Message, TextPart
from ...protocol.structured import CalledFunction, Tool, ToolCall
from . import tool_messages as tool_turns
from .tool_messages import Change

END_MARK = "\U0010fffe"
_MARKS = re.compile(r"zq\d+xk")  # the markers that `Probe` inserts
_LISTED = ("'text': '", '"text": "')  # prefixes of a text in a list of parts that a template printed, as Python or JSON
_NEAR = 4096  # number of characters to search first; templates rarely write more between two texts
Level = Literal["as_is", "developer", "apart", "joined", "one_system", "no_system", "user_first"]
_LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, slots=True)
class TemplateFit:
    """Adaptation of a conversation to a template."""

    # Whether to leave out the reasoning of earlier answers.
    drops_reasoning: bool = False
    # Whether to use the template named `tool_use`, if the model has one.
    tool_template: bool = False
    # Whether to write tools, calls and results into the text of messages.
    tools_as_text: bool = False
    # Whether contents are lists of parts instead of strings.
    lists: bool = False
    # Changes to messages; each level includes the levels before. "developer": role developer becomes system. "apart":
    # text and each call become separate messages. "joined": adjacent messages of one role become one. "one_system": one
    # system message, at the front. "no_system": none. "user_first": an empty user message before a leading assistant.
    level: Level = "developer"
    # Whether arguments of calls are JSON text instead of objects.
    raw_arguments: bool = False
    # Whether null contents stay null instead of becoming empty strings.
    null_content: bool = False
    # Whether `tools` is an empty list instead of None, for templates that iterate over it.
    empty_tools: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """Input of a chat template."""

    messages: Sequence[Message]
    tools: Sequence[Tool]
    add_generation_prompt: bool
    # Whether the last message is continued; its content then ends with END_MARK.
    is_open: bool
    fit: TemplateFit = TemplateFit()
    # Further variables for the template; the standard variables take precedence.
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def has_calls(self) -> bool:
        return any(message.tool_calls or message.role == "tool" for message in self.messages)

    def fits(self, *, tool_template: bool, has_developer: bool) -> Iterator[TemplateFit]:
        """Yield the adaptations to try, the smallest change first."""
        uses_tools = bool(self.tools) or self.has_calls
        named = [bool(self.tools), not self.tools] if tool_template and uses_tools else [False]
        levels = _LEVELS if has_developer else _LEVELS[1:]
        written = [(False, False), (True, False), (False, True), (True, True)] if self.has_calls else [(False, False)]
        ways = [(False, *way) for way in written] + [(True, False, False)] * uses_tools
        drops = [False, True] if any(message.thoughts for message in self.messages) else [False]
        choices = itertools.product(drops, [False, True], ways, [False, True], named)
        for drop, empty, (text, raw, null), lists, template in choices:
            for level in levels:
                yield TemplateFit(drop, template, text, lists, level, raw, null, empty)

    def put(self, fit: TemplateFit, tool_style: str) -> Conversation:
        """Return a copy of the conversation, adapted by `fit`."""
        style = _TOOL_STYLES.get(tool_style, _TOOL_STYLES["hermes"])
        conversation = _tools_as_text(self, style) if fit.tools_as_text else self
        messages = conversation.messages
        if fit.drops_reasoning:
            messages = [msgspec.structs.replace(message, reasoning_content=None) for message in messages]
        if fit.level != "as_is":
            messages = [_with_role(each, "system") if each.role == "developer" else each for each in messages]
        if fit.level == "user_first":
            messages = _user_first(messages)
        if fit.level in ("one_system", "no_system", "user_first"):
            messages = _folded(messages, fit.level == "one_system", self.is_open)
        if fit.level not in ("as_is", "developer"):
            messages = [_with_short_ids(part) for message in messages for part in _split_calls(message)]
        if fit.level not in ("as_is", "developer", "apart"):
            messages = _joined(messages)
        return replace(conversation, messages=messages, fit=fit)

    def context(self, change: Change) -> dict[str, Any]:
        """Return the template's variables, with `change` applied to every user string."""

        def change_text(text: str) -> str:
            return change(text[:-1]) + END_MARK if text.endswith(END_MARK) else change(text)

        changed = change_text if self.is_open else change
        no_tools = [] if self.fit.empty_tools else None
        return {
            **self.options,
            "messages": [self._as_dict(message, changed) for message in self.messages],
            "tools": [tool_turns.tool_as_dict(tool, changed) for tool in self.tools] or no_tools,
            "documents": None,
            "add_generation_prompt": self.add_generation_prompt,
        }

    def _as_dict(self, message: Message, change: Change) -> dict[str, Any]:
        content: Any = change(message.text)
        if message.content is None and self.fit.null_content:
            content = None
        elif self.fit.lists:
            content = [{"type": "text", "text": change(part)} for part in parts_of(message)]
        fields: dict[str, Any] = {"role": str(message.role), "content": content}
        if message.name is not None:
            fields["name"] = change(message.name)
        return {**fields, **tool_turns.fields(message, change, self.fit.raw_arguments)}


@dataclass(frozen=True, slots=True)
class Probe:
    """Copy of a conversation with a unique marker instead of each text, to detect text that a template drops."""

    conversation: Conversation
    # Map from each marker to the request field whose text the marker replaces.
    marks: dict[str, str]

    @staticmethod
    def of(conversation: Conversation) -> Probe:
        marks: dict[str, str] = {}

        def mark(place: str) -> str:
            text = f"zq{len(marks)}xk"  # matches _MARKS
            marks[text] = place
            return text

        messages = [_marked(message, f"messages[{index}]", mark) for index, message in enumerate(conversation.messages)]
        tools = [
            Tool(tool.type, msgspec.structs.replace(tool.function, name=mark(f"tools[{index}]")))
            for index, tool in enumerate(conversation.tools)
        ]
        return Probe(replace(conversation, messages=messages, tools=tools), marks)

    def missing(self, text: str) -> str | None:
        """Return the first request field whose marker is missing in the rendered `text`; None if no marker is missing.

        A marker inside a printed Python list counts as missing too: such a template does not read content parts.
        """
        first: dict[str, int] = {}
        for match in _MARKS.finditer(text):
            first.setdefault(match[0], match.start())
        for mark, place in self.marks.items():
            start = first.get(mark)
            if start is None or text.endswith(_LISTED, 0, start):
                return place
        return None


def first_missing(messages: Sequence[Message], prompt: str) -> str | None:
    """Return the field, such as `messages[2]`, of the first message whose text is missing in the prompt, or None.

    Ignores surrounding whitespace, JSON escapes, and the assistant's reasoning, which many templates remove.
    """
    end = 0
    for index, message in enumerate(messages):
        for part in parts_of(message):
            match_end = _end_of_any(list(_forms(part.removesuffix(END_MARK).strip(), message.role)), prompt, end)
            if match_end is None:
                return f"messages[{index}]"
            end = match_end
    return None


def _end_of_any(forms: list[str], prompt: str, start: int) -> int | None:
    """Return the offset after the first of `forms` that the prompt contains; None if it contains none.

    Searches near `start` first: texts are mostly in order, and full searches would take quadratic time.
    """
    near = start + max(map(len, forms)) + _NEAR
    for first, last in ((start, near), (start, None), (0, None)):
        for form in forms:
            position = prompt.find(form, first, last)
            if position >= 0:
                return position + len(form)
    return None


def parts_of(message: Message) -> list[str]:
    """Return the texts of a message's content."""
    content = message.content or []
    return [content] if isinstance(content, str) else [part.text for part in content]


def _forms(core: str, role: str) -> Iterator[str]:
    yield core
    yield json.dumps(core, ensure_ascii=False)[1:-1]
    yield json.dumps(core)[1:-1]
    if role == "assistant":
        yield core.rpartition("</think>")[2].strip()


def _marked(message: Message, place: str, mark: Callable[[str], str]) -> Message:
    texts = [mark(place) if text.strip(f"{END_MARK} \t\r\n") else "" for text in parts_of(message)]
    if message.text.endswith(END_MARK):
        texts[-1] += END_MARK
    calls = [_marked_call(call, place, mark) for call in message.tool_calls or ()]
    content = None if message.content is None else [*map(TextPart, texts)]
    thoughts = "thoughts" if message.thoughts else None  # no marker, because templates leave out earlier reasoning
    return msgspec.structs.replace(message, content=content, tool_calls=calls or None, reasoning_content=thoughts)


def _marked_call(call: ToolCall, place: str, mark: Callable[[str], str]) -> ToolCall:
    name, written = mark(place), call.function.arguments
    arguments = tool_turns.arguments_of(call)
    if arguments:
        written = mark(place) if isinstance(arguments, str) else json.dumps({mark(place): mark(place)})
    return ToolCall(call.id, CalledFunction(name, written))


def _with_role(message: Message, role: Literal["system", "user"]) -> Message:
    return msgspec.structs.replace(message, role=role)


def _merged(turns: Sequence[Message]) -> Message:
    """Return a copy of the last message, with the texts and the reasoning of all messages."""
    texts: list[str] = []
    for turn in turns:
        said = parts_of(turn)
        if texts and said:
            texts[-1] += "\n\n"
        texts += said
    thoughts = "\n\n".join(turn.thoughts for turn in turns if turn.thoughts)
    return msgspec.structs.replace(turns[-1], content=[*map(TextPart, texts)], reasoning_content=thoughts)


def _split_calls(message: Message) -> list[Message]:
    """Split text and calls into separate messages, as some templates allow one call per message, without text."""
    calls = message.tool_calls or []
    if not calls or (len(calls) == 1 and not message.text):
        return [message]
    parts = [msgspec.structs.replace(message, tool_calls=None)] if message.text else []
    parts += [msgspec.structs.replace(message, content=None, tool_calls=[call]) for call in calls]
    return parts[:1] + [msgspec.structs.replace(part, reasoning_content=None) for part in parts[1:]]


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Join adjacent messages of one role, except calls and results."""
    runs: list[list[Message]] = []
    for message in messages:
        last = runs[-1][-1] if runs else None
        if last and last.role == message.role != "tool" and not last.tool_calls and last.name == message.name:
            runs[-1].append(message)
        else:
            runs.append([message])
    return [run[0] if len(run) == 1 else _merged(run) for run in runs]


def _folded(messages: Sequence[Message], keeps_first: bool, is_open: bool) -> list[Message]:
    """Move system messages into the next user message. `keeps_first`: leave system messages at the front in place."""
    folded: list[Message] = []
    waiting: list[Message] = []
    at_front = keeps_first
    for message in messages:
        at_front = at_front and message.role == "system"
        if message.role == "system" and not at_front:
            waiting.append(message)
        elif message.role == "user" and waiting:
            folded.append(_merged([*waiting, message]))
            waiting = []
        else:
            folded.append(message)
    if waiting:
        folded.insert(len(folded) - is_open, _with_role(_merged(waiting), "user"))
    return folded


def _user_first(messages: Sequence[Message]) -> list[Message]:
    first = next((index for index, message in enumerate(messages) if message.role != "system"), len(messages))
    begun = messages[first : first + 1]
    return [*messages[:first], *([Message("user", "")] if begun and begun[0].role != "user" else []), *messages[first:]]


def _with_short_ids(message: Message) -> Message:
    """Shorten call ids to nine letters and digits, the only format that Mistral's templates accept."""
    calls = [ToolCall(_short(call.id), call.function) for call in message.tool_calls or ()]
    answered = None if message.tool_call_id is None else _short(message.tool_call_id)
    return msgspec.structs.replace(message, tool_calls=calls or None, tool_call_id=answered)


def _short(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode("utf-8", "replace")).hexdigest()[:9]


# Text before a call, after a call, and before its arguments, keyed by the name of a `ToolFormat`.
_TOOL_STYLES = {
    "hermes": ('<tool_call>\n{"name": ', "}\n</tool_call>", ', "arguments": '),
    "llama3": ('{"name": ', "}", ', "parameters": '),
    "mistral": ('[TOOL_CALLS][{"name": ', "}]", ', "arguments": '),
    "mistral-args": ("[TOOL_CALLS]", "", "[ARGS]"),
    "gemma4": ("<|tool_call>call:", "<tool_call|>", ""),
}


def _tools_as_text(conversation: Conversation, style: tuple[str, str, str]) -> Conversation:
    """Write tools, calls and results as text into system, assistant and user messages."""
    opener, closer, glue = style

    def written(name: str, arguments: str) -> str:
        return f"{opener}{json.dumps(name) if opener.endswith(' ') else name}{glue}{arguments}{closer}"

    messages: list[Message] = []
    for message in conversation.messages:
        if message.tool_calls:
            calls = [written(call.function.name, call.function.arguments) for call in message.tool_calls]
            text = "\n".join([*filter(None, [message.text]), *calls])
            messages.append(msgspec.structs.replace(message, content=text, tool_calls=None))
        elif message.role == "tool":
            messages.append(Message("user", f"<tool_response>\n{message.text}\n</tool_response>"))
        else:
            messages.append(message)
    if conversation.tools:
        functions = [msgspec.structs.replace(tool.function, strict=None) for tool in conversation.tools]
        listed = "\n".join(msgspec.json.encode(function).decode() for function in functions)
        example = written("NAME", '{"PARAMETER": VALUE}')
        offer = Message("system", f"You can call these functions:\n{listed}\nTo call one, write:\n{example}")
        if messages[0].role in ("system", "developer"):
            messages[0] = _with_role(_merged([messages[0], offer]), "system")
        else:
            messages.insert(0, offer)
    return replace(conversation, messages=messages, tools=())
