"""Conversion of an answer, whole or streamed, to OpenAI messages with separate reasoning, tool calls and text."""

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

_MAX_EQUAL_CALLS = 3  # an answer ends at its third equal call, because the model is looping


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """Tools of a request, and the model's format for calls."""

    format: ToolFormat
    use: ToolUse
    # Reasoning style of the model; calls inside of reasoning are ignored.
    reasoning: ReasoningStyle | None = None

    def parser(self) -> ToolCallParser:
        return ToolCallParser(self.format.syntax, {tool.function.name for tool in self.use.tools})

    def call_limit(self, constraint: Constraint | None, *, detects_repetition: bool) -> CallLimit | None:
        """Create the limit on one answer's calls; None if no limit applies.

        The answer ends after the first call if only one call is allowed and no constraint enforces that. It also ends
        if equal calls repeat.
        """
        once = constraint is None and not self.use.parallel
        if not (once or (detects_repetition and self.use.parallel)):
            return None
        return CallLimit(self.parser(), once=once, reasoning=self.reasoning)


class CallLimit:
    """Matcher that ends an answer after its first call if `once`, else after the third equal call. `push` has the
    interface of `StopMatcher.push`."""

    def __init__(self, parser: ToolCallParser, *, once: bool, reasoning: ReasoningStyle | None = None) -> None:
        self._parser = parser
        self._splitter = None if reasoning is None else ReasoningSplitter(reasoning)
        self._once = once
        self._calls: list[list[str]] = []  # name and arguments of each call so far

    def push(self, text: str) -> tuple[str, bool]:
        """Return the part of `text` that belongs to the answer, and whether the answer ends here."""
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
    """Parser of one answer in the model's format. The finish reason becomes `tool_calls` if a tool was called."""

    def __init__(self, tools: OfferedTools | None, reasoning: ReasoningStyle | None = None) -> None:
        self._format = None if tools is None else tools.format
        self._parser = None if tools is None else tools.parser()
        self._splitter = None if reasoning is None else ReasoningSplitter(reasoning)
        self._called = False

    def read(self, text: str, finish_reason: FinishReason | None) -> tuple[Delta, FinishReason | None]:
        """Parse more text and return the delta to send. Pass `finish_reason` with the last piece of text."""
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
        """Parse a whole answer at once."""
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
