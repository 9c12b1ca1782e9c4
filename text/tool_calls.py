"""Incremental parser that separates tool calls from the text of an answer while it is generated.

The joined results do not depend on how the text is split into pushes. Text that only looks like a call, and calls of
undeclared functions, stay text. Arguments are passed on exactly as the model wrote them, valid JSON or not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from .detokenize import begun_mark

#: Tool-call formats: see `ToolFormat`. The last three have vLLM's names.
FormatName = Literal["hermes", "llama3", "mistral", "mistral-args", "qwen3_coder", "glm45", "gemma4"]
_MAX_PENDING = 16_384  # maximum characters held back until it is clear whether a call follows


def _prefix_pattern(mark: str) -> str:
    """Return a pattern that matches any non-empty prefix of `mark`."""
    return "|".join(re.escape(mark[:end]) for end in range(len(mark), 0, -1))


# Patterns of a function's name and of the call id that some Mistral models write after the name; the id is ignored.
# Possessive quantifiers (`++`, `*+`) prevent backtracking, which would take quadratic time on long whitespace.
_ID = r"\[CALL_ID\]\s*+[A-Za-z0-9_-]{0,64}+\s*+"
_NAME = re.compile(rf"\s*+([A-Za-z0-9_.-]{{1,64}}+)\s*+(?:{_ID})?+(?:\[ARGS\]\s*+)?+(?=\{{)")
_MAYBE_NAME = re.compile(
    rf"\s*+[A-Za-z0-9_.-]{{0,64}}+\s*+(?:{_prefix_pattern('[CALL_ID]')}|(?:{_ID})?+(?:{_prefix_pattern('[ARGS]')})?+\s*+)"
)


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """Tool-call syntax of a family of models. `opener` precedes a call or a list of calls, `closer` follows a call."""

    opener: str
    closer: str = ""
    # Whether an answer may also begin with a call without opener. Such a call needs arguments, and more calls may
    # follow directly or after semicolons.
    bare: bool = False
    # Whether a JSON list of calls, or a function's name directly followed by its arguments, may follow the opener.
    lists: bool = False
    # Whether whitespace before a call's opener stays in the text.
    keeps_blanks: bool = False


@dataclass(slots=True)
class CallDelta:
    """Next piece of the call with this index, in a streamed answer."""

    index: int
    # Name of the function, only in the first piece.
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class ParsedText:
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list[CallDelta])


class ToolCallParser:
    """Parser for an answer: `push` its text, then `flush`. `names`: declared functions; `num_calls`: complete calls."""

    def __init__(self, syntax: ToolSyntax, names: Collection[str]) -> None:
        self.num_calls = 0
        self._syntax = syntax
        self._names = names
        self._state: Callable[[], bool] = self._at_start if syntax.bare else self._parse_text
        self._buffer = ""
        self._opening = ""  # text since the current opener, including the whitespace before it
        self._undeclared, self._undeclared_end = "", 0  # calls of unknown tools, and their end in `_opening`
        self._marked = self._called = False  # whether `_opening` has an opener; whether it has a declared call
        self._in_list = False
        self._call = _CallReader()
        self._parsed = ParsedText()

    def push(self, text: str) -> ParsedText:
        self._buffer += text
        while self._state():
            pass
        return self._take_parsed()

    def flush(self) -> ParsedText:
        """End the answer: return the calls and text that were held back."""
        if self._state == self._parse_call:
            self._end_call(whole=False)
        if self._state == self._after_call and self._called:
            cut_off = self._syntax.closer.startswith(self._buffer.strip())  # the closer is partial or missing
            self._buffer = "" if cut_off else self._buffer
        self._back_to_text()
        self._parsed.content += self._buffer
        self._buffer = ""
        return self._take_parsed()

    def _take_parsed(self) -> ParsedText:
        parsed, self._parsed = self._parsed, ParsedText()
        return parsed

    # States of the parser. Each method consumes what it can from the buffer, and returns False to wait for more text.

    def _at_start(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest.startswith("{"):
            return self._begin_call(rest)
        self._state = self._parse_text
        return True

    def _parse_text(self) -> bool:
        opener = self._syntax.opener
        start = self._buffer.find(opener)
        is_complete = start >= 0
        if not is_complete:
            start = len(self._buffer) - begun_mark(self._buffer, (opener,))
        before = self._buffer[:start] if self._syntax.keeps_blanks else self._buffer[:start].rstrip()
        self._parsed.content += before
        if is_complete:
            end = start + len(opener)
            self._opening, self._buffer, self._state = self._buffer[len(before) : end], self._buffer[end:], self._opened
            self._marked = True
        else:
            self._buffer = self._buffer[len(before) :]
        return is_complete

    def _opened(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest.startswith("{"):
            return self._begin_call(rest)
        if self._syntax.lists and rest.startswith("["):
            self._drop(len(self._buffer) - len(rest) + 1)
            self._in_list, self._state = True, self._after_call
            return True
        if self._syntax.lists:
            if named := _NAME.match(self._buffer):
                return self._begin_call(self._buffer[named.end() :], named[1])
            if _MAYBE_NAME.fullmatch(self._buffer):
                return False
        return self._back_to_text()

    def _parse_call(self) -> bool:
        used = self._call.read(self._buffer)
        self._buffer = self._buffer[used:]
        self._emit_call()
        if not self._call.ended:
            return False
        self._end_call(whole=True)
        return True

    def _after_call(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        glue = (",", "]") if self._in_list else (";",) if self._syntax.bare else ()
        for mark in (*glue, self._syntax.closer):
            if mark and rest.startswith(mark):
                self._in_list = self._in_list and mark != "]"
                self._drop(len(self._buffer) - len(rest) + len(mark))
                return True
        if rest.startswith("{") and (self._in_list or self._syntax.bare):
            return self._begin_call(rest)
        marks = [mark for mark in (self._syntax.opener, self._syntax.closer) if mark]
        if any(mark.startswith(rest) and mark != rest for mark in marks):
            return False
        return self._back_to_text()

    def _drop(self, length: int) -> None:
        """Skip characters of the answer. `_back_to_text` emits them as text if no declared call follows."""
        self._opening += self._buffer[:length]
        self._buffer = self._buffer[length:]

    def _begin_call(self, rest: str, name: str = "") -> bool:
        self._call = _CallReader(name)
        self._drop(len(self._buffer) - len(rest))
        self._state = self._parse_call
        return True

    def _emit_call(self) -> None:
        """Emit the function's name as soon as the text is certainly a call, then the arguments as they arrive."""
        call = self._call
        if not call.announced and call.name in self._names and self._looks_like_call(call):
            call.announced = self._called = True
            self._parsed.content += self._undeclared
            self._undeclared = ""
            self._parsed.calls.append(CallDelta(self.num_calls, call.name))
        if call.announced and call.arguments:
            self._parsed.calls.append(CallDelta(self.num_calls, arguments=call.arguments))
            call.arguments = ""

    def _looks_like_call(self, call: _CallReader) -> bool:
        """Return whether the object is a call (it has an opener or arguments), not a JSON answer with a `name`."""
        marked = not self._syntax.bare or self._marked
        return bool(call.name) and (marked or call.has_arguments)

    def _end_call(self, *, whole: bool) -> None:
        call, self._state = self._call, self._after_call
        if not call.announced:
            self._opening += call.raw
            # Between two undeclared calls, keep the original text, such as a comma or a space.
            self._undeclared += self._opening[self._undeclared_end :] if self._undeclared else call.raw
            self._undeclared_end = len(self._opening)
            if not self._looks_like_call(call) or len(self._opening) > _MAX_PENDING:
                self._back_to_text()
            return
        call.finish(whole=whole)
        self._emit_call()
        self.num_calls += 1
        self._marked = False

    def _back_to_text(self) -> bool:
        """End a series of calls. Emit its original text if no call was declared, else only the undeclared calls."""
        self._parsed.content += self._undeclared if self._called else self._opening
        self._opening = self._undeclared = ""
        self._in_list = self._marked = self._called = False
        self._state = self._parse_text
        return True


class _CallReader:
    """Incremental reader of a JSON object `{"name": ..., "arguments": ...}`, or of plain arguments if `name` is given.

    `arguments`: arguments read but not emitted yet; `has_arguments`: whether the key `arguments` was read; `raw`: the
    text read so far.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.announced = False
        self.arguments = ""
        self.has_arguments = False
        self.ended = False
        self.raw = ""
        self._only_arguments = bool(name)
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._member = ""  # current key or value, except the part already in `arguments`
        self._begun = False
        self._quoted = False
        self._any_arguments = False

    def read(self, text: str) -> int:
        """Read up to the end of the object, and return the number of characters read."""
        for index, char in enumerate(text):
            self._read(char)
            if self.ended:
                self.raw += text[: index + 1]
                return index + 1
        self.raw += text
        return len(text)

    def finish(self, *, whole: bool) -> None:
        """Set missing arguments at the end: `{}` if the call is `whole`, else the start of a cut-off JSON string."""
        if not self._any_arguments:
            self.arguments = "{}" if whole else self._member if self._is_arguments else ""

    def _read(self, char: str) -> None:
        structural = not self._in_string
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.ended = self._depth == 0
        at_top = structural and self._depth == 1
        if self._only_arguments:
            self._take(char)
        elif self.ended or (at_top and char == ","):
            self._end_member()
        elif at_top and char == ":" and self._key is None:
            self._key, self._member, self._begun = _string(self._member), "", False
            self.has_arguments = self.has_arguments or self._is_arguments
        elif not (at_top and char == "{"):
            self._add(char)

    def _add(self, char: str) -> None:
        if not self._begun:
            if char.isspace():
                return
            self._begun, self._quoted = True, char == '"'
        self._member += char
        if self._is_arguments and not self._quoted and (self._depth > 1 or not char.isspace()):
            self._take(self._member)
            self._member = ""

    def _take(self, text: str) -> None:
        self.arguments += text
        self._any_arguments = True

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters")

    def _end_member(self) -> None:
        if self._key == "name":
            self.name = self.name or _string(self._member)
        elif self._is_arguments and self._quoted:
            self._take(_string(self._member) or self._member)
        self._key, self._member, self._begun = None, "", False


def _string(text: str) -> str:
    """Return the content of a JSON string; empty for any other text."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
