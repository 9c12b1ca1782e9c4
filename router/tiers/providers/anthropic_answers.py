"""Translation of Anthropic's answers and streams to chat completions."""

from __future__ import annotations

from collections import defaultdict
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
_SHOWN = {"text": "content", "thinking": "reasoning_content"}  # names in chat completions
#: Fields of thinking blocks. The last field proves to the API that the block is its own.
_SIGNED = {"thinking": ("thinking", "signature"), "redacted_thinking": ("data",)}


def signed_thoughts(blocks: Any) -> list[dict[str, Any]]:
    """Return the thinking blocks that the API has signed."""
    return [
        {"type": kind, **{name: block.get(name) for name in _SIGNED[kind]}}
        for block in tables(blocks) or []
        if (kind := str(block.get("type"))) in _SIGNED and block.get(_SIGNED[kind][-1])
    ]


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
    said = message(texts, reasoning, calls)
    if signed := signed_thoughts(body.get("content")):
        said["thinking_blocks"] = signed
    choice = {"index": 0, "message": said, "finish_reason": _finish(body.get("stop_reason")), **_stopped_by(body)}
    return completion(
        body.get("id"), body.get("model"), [choice] if known else [], _usage(table(body.get("usage")) or {})
    )


class MessageEvents(ChatEvents):
    """Translator of one stream's events, from `message_start` to `message_stop`. Only one block is open at a time."""

    def __init__(self) -> None:
        self._chunks = ChunkMaker()
        self._counts: dict[str, Any] = {}
        self._block: dict[str, Any] = {}  # first event of the open block
        self._texts = defaultdict[str, list[str]](list)  # text of the following events, by field
        self._num_signed = 0

    def read(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        kind = event.get("type")
        if kind == "message_start":
            return self._start(table(event.get("message")) or {})
        if kind == "content_block_start":
            return self._begin(table(event.get("content_block")) or {})
        if kind == "content_block_delta":
            return self._delta(table(event.get("delta")) or {})
        if kind == "content_block_stop":
            return self._end()
        if kind == "message_delta":
            self._counts |= table(event.get("usage")) or {}
            delta = table(event.get("delta")) or {}
            if (finish := _finish(delta.get("stop_reason"))) is not None:
                last = self._chunks.delta({}, finish)
                last["choices"][0] |= _stopped_by(delta)
                return [last, self._chunks.usage(_usage(self._counts))]
        return []  # a ping, `message_stop`, or an unknown event

    def _start(self, begun: dict[str, Any]) -> list[dict[str, Any]]:
        self._chunks.id, self._chunks.model = str(begun.get("id")), str(begun.get("model"))
        self._counts = {**(table(begun.get("usage")) or {}), "output_tokens": None}  # counted at the end
        return [self._chunks.delta({"role": "assistant", "content": ""}), self._chunks.usage(_usage(self._counts))]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        self._block = block
        self._texts.clear()
        if block.get("type") == "text" and block.get("text"):
            return [self._chunks.delta({"content": str(block["text"])})]
        if block.get("type") != "tool_use":
            return []
        return [self._chunks.delta({"tool_calls": [tool_call(str(block.get("id")), str(block.get("name")), "")]})]

    def _delta(self, delta: dict[str, Any]) -> list[dict[str, Any]]:
        name = str(delta.get("type")).removesuffix("_delta").replace("input_json", "partial_json")
        text = str(delta.get(name) or "")
        self._texts[name].append(text)
        if name in _SHOWN:
            return [self._chunks.delta({_SHOWN[name]: text})]
        is_call = self._block.get("type") == "tool_use"
        return [self._arguments(text)] if is_call and name == "partial_json" and text else []

    def _end(self) -> list[dict[str, Any]]:
        block = self._block | {name: "".join(texts) for name, texts in self._texts.items()}
        if signed := signed_thoughts([block]):
            self._num_signed += 1
            return [self._chunks.delta({"thinking_blocks": [{"index": self._num_signed - 1, **signed[0]}]})]
        lacks_arguments = block.get("type") == "tool_use" and not block.get("partial_json")
        return [self._arguments(arguments_of(block.get("input")))] if lacks_arguments else []

    def _arguments(self, text: str) -> dict[str, Any]:
        return self._chunks.delta({"tool_calls": [{"function": {"arguments": text}}]})


def _finish(reason: Any) -> str | None:
    return None if reason is None else _FINISHES.get(str(reason), "stop")


def _stopped_by(ended: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's field for the stop sequence that ended the answer."""
    return {} if ended.get("stop_sequence") is None else {"stop_reason": ended["stop_sequence"]}


def _usage(counts: dict[str, Any]) -> dict[str, Any]:
    """Convert token counts to OpenAI's form, with cache reads and writes as prompt tokens."""
    cached, stored = (whole(counts.get(f"cache_{name}_input_tokens")) for name in ("read", "creation"))
    read = whole(counts.get("input_tokens")) + cached + stored
    usage = usage_of(read, whole(counts.get("output_tokens")), cached, stored)
    known = usage if counts.get("output_tokens") is not None else ("prompt_tokens", "prompt_tokens_details")
    return {name: usage[name] for name in known}
