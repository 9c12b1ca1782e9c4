"""Translation of Anthropic's answers, whole or streamed, to chat completion chunks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ....protocol.dialects.chat_chunks import PAUSED
from ...request.json_narrowing import object_of, table, tables
from .provider import ChatEvents, ChunkMaker, arguments_of, tool_call, usage_of, whole

_FINISHES = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    PAUSED: "length",  # of OpenAI's reasons, the only one that means an unfinished answer
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_PAUSED_NOTE = "the cloud paused its answer: send the answer back unchanged to continue"
_SHOWN = {"text": "content", "thinking": "reasoning_content"}  # names in chat completions
#: Fields of thinking blocks. Anthropic checks the last field, its signature or encrypted data.
_SIGNED = {"thinking": ("thinking", "signature"), "redacted_thinking": ("data",)}


def signed_thoughts(blocks: Any) -> list[dict[str, Any]]:
    """Return the thinking blocks that Anthropic has signed, with only the fields that its API accepts."""
    return [
        {"type": kind, **{name: block.get(name) for name in _SIGNED[kind]}}
        for block in tables(blocks) or []
        if (kind := str(block.get("type"))) in _SIGNED and block.get(_SIGNED[kind][-1])
    ]


class MessageEvents(ChatEvents):
    """Translator of a message or of the events of its stream. Only one content block is open at a time."""

    def __init__(self) -> None:
        self._chunks = ChunkMaker()
        self._counts: dict[str, Any] = {}
        self._block: dict[str, Any] = {}  # first event of the latest block
        self._texts = defaultdict[str, list[str]](list)  # texts of the latest block's deltas, by field
        self._citations: list[dict[str, Any]] = []  # citations of the latest block
        self._begin_at = self._end_at = 0  # place of the latest text block in the answer's text, in characters
        self._is_text_open = False  # whether the text of the next chunk would continue an uncited text block
        self._call = 0  # index of the latest tool call
        self._lost: dict[str, None] = {}  # types of blocks without an equivalent, in order

    def read(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        kind = event.get("type")
        if kind == "message":
            made = self._start(event)
            for block in tables(event.get("content")) or []:
                made += [*self._begin(block), *self._end()]
            return [*made, *self._finish(event, event.get("usage"))]
        if kind == "message_start":
            return self._start(object_of(event.get("message")))
        if kind == "content_block_start":
            return self._begin(object_of(event.get("content_block")))
        if kind == "content_block_delta":
            return self._delta(object_of(event.get("delta")))
        if kind == "content_block_stop":
            return self._end()
        if kind == "message_delta":
            return self._finish(object_of(event.get("delta")), event.get("usage"))
        return []  # a ping, `message_stop`, or an unknown event

    def _start(self, begun: dict[str, Any]) -> list[dict[str, Any]]:
        self._chunks.id, self._chunks.model = str(begun.get("id")), str(begun.get("model"))
        self._counts = {**object_of(begun.get("usage")), "output_tokens": None}  # counted at the end
        return [self._chunks.delta({"role": "assistant", "content": ""}), self._chunks.usage(_usage(self._counts))]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        kind, continues_text = str(block.get("type")), self._is_text_open
        self._block, self._citations, self._begin_at = block, [*(tables(block.get("citations")) or ())], self._end_at
        self._texts.clear()
        if kind in ("text", "tool_use", *_SIGNED):
            self._is_text_open = kind == "text"
        else:
            self._lost[kind] = None
        if kind == "tool_use":
            call = tool_call(str(block.get("id")), str(block.get("name")), "")
            calls = self._chunks.entries("tool_calls", [call])
            self._call = calls[0]["index"]
            return [self._chunks.delta({"tool_calls": calls})]
        ended = [self._chunks.delta({"citations": []})] if kind == "text" and continues_text else []
        return [*ended, *self._shown(kind, str(block.get(kind) or ""))]

    def _delta(self, delta: dict[str, Any]) -> list[dict[str, Any]]:
        self._citations += [citation] if (citation := table(delta.get("citation"))) else []
        name = str(delta.get("type")).removesuffix("_delta").replace("input_json", "partial_json")
        text = str(delta.get(name) or "")
        self._texts[name].append(text)
        is_call = self._block.get("type") == "tool_use"
        return [self._arguments(text)] if is_call and name == "partial_json" and text else self._shown(name, text)

    def _shown(self, kind: str, text: str) -> list[dict[str, Any]]:
        """Return the chunk of a text or thought; none for an empty text and other kinds."""
        if not text or kind not in _SHOWN:
            return []
        self._end_at += len(text) if kind == "text" else 0
        return [self._chunks.delta({_SHOWN[kind]: text})]

    def _end(self) -> list[dict[str, Any]]:
        block = self._block | {name: "".join(texts) for name, texts in self._texts.items()}
        if signed := signed_thoughts([block]):
            return [self._chunks.delta({"thinking_blocks": self._chunks.entries("thinking_blocks", signed)})]
        if self._citations:
            self._is_text_open = False
            return [self._chunks.delta(self._cited())]
        lacks_arguments = block.get("type") == "tool_use" and not block.get("partial_json")
        return [self._arguments(arguments_of(block.get("input")))] if lacks_arguments else []

    def _cited(self) -> dict[str, Any]:
        """Return the citations of a text block in Anthropic's form, and in OpenAI's form if they have a URL."""
        place = {"start_index": self._begin_at, "end_index": self._end_at}
        cited = [
            {"type": "url_citation", "url_citation": {"url": url, "title": str(each.get("title") or ""), **place}}
            for each in self._citations
            if (url := str(each.get("url") or each.get("source"))).startswith(("http://", "https://"))
        ]
        annotations = {"annotations": self._chunks.entries("annotations", cited)} if cited else {}
        return {"citations": self._chunks.entries("citations", self._citations), **annotations}

    def _arguments(self, text: str) -> dict[str, Any]:
        return self._chunks.delta({"tool_calls": [{"index": self._call, "function": {"arguments": text}}]})

    def _finish(self, ended: dict[str, Any], counts: Any) -> list[dict[str, Any]]:
        self._counts |= object_of(counts)
        usage, reason = self._chunks.usage(_usage(self._counts)), ended.get("stop_reason")
        if reason is None:
            return [usage]
        last = self._chunks.delta({}, _FINISHES.get(str(reason), "stop"))
        notes = [_PAUSED_NOTE] if reason == PAUSED else []
        if self._lost:
            notes.append(f"blocks of the answer were left out: {', '.join(self._lost)}")
        if notes:
            last["updraft"] = {"notes": notes}
        stopped_by = PAUSED if reason == PAUSED else ended.get("stop_sequence")
        if stopped_by is not None:  # vLLM's field for the stop sequence that ended the answer
            last["choices"][0]["stop_reason"] = stopped_by
        return [last, usage]


def _usage(counts: dict[str, Any]) -> dict[str, Any]:
    """Convert token counts to OpenAI's form, with cache reads and writes as prompt tokens."""
    cached, stored = (whole(counts.get(f"cache_{name}_input_tokens")) for name in ("read", "creation"))
    read = whole(counts.get("input_tokens")) + cached + stored
    usage = usage_of(read, whole(counts.get("output_tokens")), cached, stored)
    known = usage if counts.get("output_tokens") is not None else ("prompt_tokens", "prompt_tokens_details")
    return {name: usage[name] for name in known}
