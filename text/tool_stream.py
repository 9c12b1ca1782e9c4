"""Tool calls of an answer as OpenAI's clients expect them: whole, or piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..protocol.responses import AssistantMessage, Delta, FinishReason, FunctionDelta, ToolCallDelta
from ..protocol.structured import CalledFunction, ToolCall
from .tool_calls import CallDelta, ToolCallParser

if TYPE_CHECKING:
    from .tool_formats import ToolFormat


class ToolCallStream:
    """Reads one answer in the format of its model. An answer that called a tool ends with the reason `tool_calls`."""

    def __init__(self, tools: ToolFormat) -> None:
        self._format = tools
        self._parser = ToolCallParser(tools.syntax)
        self._called = False

    def read(self, text: str, finish_reason: FinishReason | None) -> tuple[Delta, FinishReason | None]:
        """More of the answer, as what is to be shown of it now. `finish_reason` comes with the last of the text."""
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
        if not calls:
            return AssistantMessage(delta.content or ""), reason
        return AssistantMessage(delta.content, tool_calls=calls), reason

    def _delta(self, call: CallDelta) -> ToolCallDelta:
        if call.name:
            name = FunctionDelta(call.arguments, call.name)
            return ToolCallDelta(call.index, name, self._format.new_call_id(), "function")
        return ToolCallDelta(call.index, FunctionDelta(call.arguments))
