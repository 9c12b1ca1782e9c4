"""An answer as OpenAI's clients expect it, whole or piece by piece: thoughts and tool calls apart from the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import UNSET

from ..protocol.responses import AssistantMessage, Delta, FinishReason, FunctionDelta, ToolCallDelta
from ..protocol.structured import CalledFunction, Constraint, ToolCall, ToolUse
from .templates.reasoning import ReasoningSplitter, ReasoningStyle
from .tool_calls import CallDelta, ToolCallParser

if TYPE_CHECKING:
    from .tool_formats import ToolFormat

_MAX_EQUAL_CALLS = 3  # of one answer: a model that writes more of them does not come to an end


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of a request, and how its model calls them."""

    format: ToolFormat
    use: ToolUse
    # Calls inside of thoughts are none.
    reasoning: ReasoningStyle | None = None

    def parser(self) -> ToolCallParser:
        """For one answer."""
        return ToolCallParser(self.format.syntax, {tool.function.name for tool in self.use.tools})

    def call_limit(self, constraint: Constraint | None, *, detects_repetition: bool) -> CallLimit | None:
        """The limit on one answer's calls: it ends behind its first, where it may make no other and no constraint holds
        it to that, or behind one that it repeats. None where neither can be.
        """
        once = constraint is None and not self.use.parallel
        if not (once or (detects_repetition and self.use.parallel)):
            return None
        return CallLimit(self.parser(), once=once, reasoning=self.reasoning)


class CallLimit:
    """Ends an answer where its first call ends, if it may call only `once`, or the third of equal ones. It is to be
    pushed the text like a `StopMatcher`.
    """

    def __init__(self, parser: ToolCallParser, *, once: bool, reasoning: ReasoningStyle | None = None) -> None:
        self._parser = parser
        self._splitter = None if reasoning is None else ReasoningSplitter(reasoning)
        self._once = once
        self._calls: list[list[str]] = []  # name and arguments of each, as far as they are written

    def push(self, text: str) -> tuple[str, bool]:
        """As much of `text` as belongs to the answer, and whether that ends here."""
        for end, char in enumerate(text, 1):
            before = self._parser.num_calls
            shown = char if self._splitter is None else self._splitter.push(char)[1]
            for call in self._parser.push(shown).calls:
                if call.index == len(self._calls):
                    self._calls.append(["", ""])
                self._calls[call.index][0] += call.name
                self._calls[call.index][1] += call.arguments
            if self._parser.num_calls > before and (
                self._once or self._calls.count(self._calls[before]) == _MAX_EQUAL_CALLS
            ):
                return text[:end], True
        return text, False


class AnswerParser:
    """Reads one answer in the format of its model. An answer that called a tool ends with the reason `tool_calls`."""

    def __init__(self, tools: OfferedTools | None, reasoning: ReasoningStyle | None = None) -> None:
        self._format = None if tools is None else tools.format
        self._parser = None if tools is None else tools.parser()
        self._splitter = None if reasoning is None else ReasoningSplitter(reasoning)
        self._called = False

    def read(self, text: str, finish_reason: FinishReason | None) -> tuple[Delta, FinishReason | None]:
        """More of the answer, as what is to be shown of it now. `finish_reason` comes with the last of the text."""
        thoughts = ""
        if self._splitter is not None:
            thoughts, text = self._splitter.push(text)
            rest = self._splitter.flush() if finish_reason is not None else ("", "")
            thoughts, text = thoughts + rest[0], text + rest[1]
        delta, reason = self._without_thoughts(text, finish_reason)
        delta.reasoning_content = thoughts or None
        return delta, reason

    def _without_thoughts(self, text: str, finish_reason: FinishReason | None) -> tuple[Delta, FinishReason | None]:
        if self._parser is None:
            return Delta(content=text or None), finish_reason
        parsed = [self._parser.push(text)]
        if finish_reason is not None:
            parsed.append(self._parser.flush())
        calls = [self._delta(call) for part in parsed for call in part.calls]
        self._called = self._called or bool(calls)
        called = self._called and finish_reason == "stop"
        content = "".join(part.content for part in parsed)
        return Delta(content=content or None, tool_calls=calls or None), "tool_calls" if called else finish_reason

    def whole(self, text: str, finish_reason: FinishReason | None) -> tuple[AssistantMessage, FinishReason | None]:
        """All of the answer at once."""
        delta, reason = self.read(text, finish_reason)
        calls: list[ToolCall] = []
        for more in delta.tool_calls or ():
            if isinstance(more.id, str):
                calls.append(ToolCall(more.id, CalledFunction(more.function.name or "", "")))
            calls[more.index].function.arguments += more.function.arguments
        thoughts = delta.reasoning_content or UNSET
        if not calls:
            return AssistantMessage(delta.content or "", reasoning_content=thoughts), reason
        return AssistantMessage(delta.content, tool_calls=calls, reasoning_content=thoughts), reason

    def _delta(self, call: CallDelta) -> ToolCallDelta:
        if call.name and self._format is not None:
            name = FunctionDelta(call.arguments, call.name)
            return ToolCallDelta(call.index, name, self._format.new_call_id(), "function")
        return ToolCallDelta(call.index, FunctionDelta(call.arguments))
