"""Conversion of an answer, whole or streamed, to OpenAI messages with separate reasoning, tool calls and text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import UNSET

from ..protocol.responses import AssistantMessage, Delta, FinishReason, FunctionDelta, ToolCallDelta
from ..protocol.sampling import SamplingParams
from ..protocol.structured import CalledFunction, Constraint, ToolCall, ToolUse
from .control_tokens import HasSpecialTokens, marks_of
from .detokenize import StopMatcher
from .templates.reasoning import ReasoningBoundary, ReasoningSplitter, ReasoningStyle
from .tool_calls import CallDelta, ToolCallParser

if TYPE_CHECKING:
    from .tool_formats import ToolFormat

_MAX_EQUAL_CALLS = 3  # an answer ends at its third equal call, because the model is looping


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """Tools of a request, and the model's format for calls."""

    format: ToolFormat
    use: ToolUse

    def parser(self) -> ToolCallParser:
        return self.format.parser({tool.function.name: tool.function.parameters or {} for tool in self.use.tools})

    def call_limit(self, constraint: Constraint | None, *, detects_repetition: bool) -> CallLimit | None:
        """Create the limit on one answer's calls; None without a limit, or if `constraint` enforces a single call."""
        once = constraint is None and not self.use.parallel
        if not (once or (detects_repetition and self.use.parallel)):
            return None
        return CallLimit(self.parser(), once=once)


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """Parts of an answer's text that are not content: tool calls and reasoning."""

    tools: OfferedTools | None = None
    reasoning: ReasoningStyle | None = None

    def marks(self, model: HasSpecialTokens) -> dict[int, str]:
        """Return the special tokens, as id -> text, whose text the parsers need."""
        calls = {} if self.tools is None else self.tools.format.marks
        return calls if self.reasoning is None else calls | marks_of(model, self.reasoning.tokens)

    def parser(self) -> AnswerParser | None:
        """Return a parser for one answer, or None if the answer is plain text."""
        return None if self.tools is None and self.reasoning is None else AnswerParser(self.tools, self.reasoning)

    def end(self, params: SamplingParams, constraint: Constraint | None) -> AnswerEnd:
        """Return a matcher that finds the end of one answer."""
        repeats = params.detects_repetition
        limit = self.tools and self.tools.call_limit(constraint, detects_repetition=repeats)
        return AnswerEnd(params.stop, limit, self.reasoning)


class CallLimit:
    """Matcher that ends an answer after its first call if `once`, else after the third equal call. `push` has the
    interface of `StopMatcher.push`."""

    def __init__(self, parser: ToolCallParser, *, once: bool) -> None:
        self._parser = parser
        self._once = once
        self._calls: list[list[str]] = []  # name and arguments of each call so far

    def push(self, text: str) -> tuple[str, bool]:
        """Return the part of `text` that belongs to the answer, and whether the answer ends here."""
        for end, char in enumerate(text, 1):
            before = self._parser.num_calls
            for call in self._parser.push(char).calls:
                if call.index == len(self._calls):
                    self._calls.append(["", ""])
                self._calls[call.index][0] += call.name
                self._calls[call.index][1] += call.arguments
            if self._parser.num_calls > before and (
                self._once or self._calls.count(self._calls[before]) == _MAX_EQUAL_CALLS
            ):
                return text[:end], True
        return text, False


class AnswerEnd:
    """Search for the end of an answer: a stop string, or the limit on calls. Reasoning is not searched."""

    def __init__(
        self, stop: tuple[str, ...] = (), call_limit: CallLimit | None = None, reasoning: ReasoningStyle | None = None
    ) -> None:
        self.searches = bool(stop) or call_limit is not None
        self._matcher = StopMatcher(stop)
        self._call_limit = call_limit
        self._boundary = ReasoningBoundary(reasoning)

    @property
    def stop(self) -> str | None:
        """Stop string that was found, if any."""
        return self._matcher.matched

    def push(self, text: str, *, too_early: bool = False) -> tuple[str, bool]:
        """Return the text safe to send, and whether the answer ends here. `too_early`: no stop string may end here."""
        if not self.searches:
            return text, False
        thoughts, text = self._boundary.push(text)
        text, stopped = self._matcher.push(text, too_early=too_early)
        text, called = self._limited(text)
        return thoughts + text, stopped or called

    def flush(self) -> tuple[str, bool]:
        """End the search: return the text that was held back, and whether the answer ends within this text."""
        thoughts, text = self._boundary.flush()
        text, stopped = self._matcher.push(text)
        text, called = self._limited(text + self._matcher.flush())
        return thoughts + text, stopped or called

    def _limited(self, text: str) -> tuple[str, bool]:
        return (text, False) if self._call_limit is None else self._call_limit.push(text)


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
