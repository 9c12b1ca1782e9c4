"""Translation of Anthropic's answers and streams to chat completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...request.json_narrowing import table, tables
from .chunks import ChunkMaker, arguments_of, completion, message, tool_call, usage_of, whole
from .provider import ChatEvents

_FINISHES = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


def completion_of(body: dict[str, Any]) -> dict[str, Any]:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in tables(body.get("content")) or []:
        if block.get("type") == "text":
            texts.append(str(block.get("text") or ""))
        elif block.get("type") == "thinking":
            reasoning.append(str(block.get("thinking") or ""))
        elif block.get("type") == "tool_use":
            calls.append(tool_call(str(block.get("id")), str(block.get("name")), arguments_of(block.get("input"))))
    known = body.get("type") == "message"
    said = {"index": 0, "message": message(texts, reasoning, calls), "finish_reason": _finish(body.get("stop_reason"))}
    return completion(
        body.get("id"), body.get("model"), [said] if known else [], _usage(table(body.get("usage")) or {})
    )


@dataclass(slots=True)
class _ToolBlock:
    """A tool call in a stream. `input`: arguments in the call's first event, usually empty."""

    index: int
    input: Any = None
    has_arguments: bool = False


class MessageEvents(ChatEvents):
    """Translator of one stream's events, from `message_start` to `message_stop`."""

    def __init__(self) -> None:
        self._chunks = ChunkMaker()
        self._counts: dict[str, Any] = {}
        self._tools: dict[int, _ToolBlock] = {}

    def read(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        kind = event.get("type")
        if kind == "message_start":
            return self._start(table(event.get("message")) or {})
        if kind == "content_block_start":
            return self._block(whole(event.get("index")), table(event.get("content_block")) or {})
        if kind == "content_block_delta":
            return self._delta(whole(event.get("index")), table(event.get("delta")) or {})
        if kind == "content_block_stop":
            tool = self._tools.get(whole(event.get("index")))
            return [] if tool is None or tool.has_arguments else [self._arguments(tool, arguments_of(tool.input))]
        if kind == "message_delta":
            self._counts |= table(event.get("usage")) or {}
            finish = _finish((table(event.get("delta")) or {}).get("stop_reason"))
            if finish is not None:
                return [self._chunks.delta({}, finish), self._chunks.usage(_usage(self._counts))]
        return []  # a ping, `message_stop`, or an unknown event

    def _start(self, begun: dict[str, Any]) -> list[dict[str, Any]]:
        self._chunks.id, self._chunks.model = str(begun.get("id")), str(begun.get("model"))
        self._counts = table(begun.get("usage")) or {}
        return [self._chunks.delta({"role": "assistant", "content": ""})]

    def _block(self, place: int, block: dict[str, Any]) -> list[dict[str, Any]]:
        if block.get("type") == "text" and block.get("text"):
            return [self._chunks.delta({"content": str(block["text"])})]
        if block.get("type") != "tool_use":
            return []
        tool = self._tools[place] = _ToolBlock(len(self._tools), block.get("input"))
        call = tool_call(str(block.get("id")), str(block.get("name")), "")
        return [self._chunks.delta({"tool_calls": [{"index": tool.index, **call}]})]

    def _delta(self, place: int, delta: dict[str, Any]) -> list[dict[str, Any]]:
        kind = delta.get("type")
        if kind == "text_delta":
            return [self._chunks.delta({"content": str(delta.get("text") or "")})]
        if kind == "thinking_delta":
            return [self._chunks.delta({"reasoning_content": str(delta.get("thinking") or "")})]
        tool = self._tools.get(place)
        if kind == "input_json_delta" and tool is not None and delta.get("partial_json"):
            tool.has_arguments = True
            return [self._arguments(tool, str(delta["partial_json"]))]
        return []

    def _arguments(self, tool: _ToolBlock, text: str) -> dict[str, Any]:
        return self._chunks.delta({"tool_calls": [{"index": tool.index, "function": {"arguments": text}}]})


def _finish(reason: Any) -> str | None:
    return None if reason is None else _FINISHES.get(str(reason), "stop")


def _usage(counts: dict[str, Any]) -> dict[str, Any]:
    """Convert token counts to OpenAI's form, with cache reads and writes as prompt tokens."""
    cached = whole(counts.get("cache_read_input_tokens"))
    read = whole(counts.get("input_tokens")) + cached + whole(counts.get("cache_creation_input_tokens"))
    return usage_of(read, whole(counts.get("output_tokens")), cached)
