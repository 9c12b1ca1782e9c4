"""Translation of Gemini's answers, whole or streamed, to chat completion chunks."""

from __future__ import annotations

from typing import Any

from ....protocol.http.ids import new_id
from ...request.json_narrowing import object_of, table, tables
from .chunks import ChunkMaker, arguments_of, tool_call, usage_of, whole
from .provider import ChatEvents

_FINISHES = {"STOP": "stop", "MAX_TOKENS": "length"}  # all other reasons mean that content was withheld


class ContentEvents(ChatEvents):
    """Translator of one answer. Each event of a stream is an answer object that contains only new parts."""

    def __init__(self) -> None:
        self._chunks = ChunkMaker()
        self._begun: set[int] = set()  # indices of candidates whose role was sent
        self._called: set[int] = set()  # indices of candidates with tool calls

    def read(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        chunks, finished = self._chunks, False
        chunks.id, chunks.model = str(event.get("responseId")), str(event.get("modelVersion"))
        made: list[dict[str, Any]] = []
        for candidate in _candidates(event):
            index = whole(candidate.get("index"))
            if index not in self._begun:
                self._begun.add(index)
                made.append(chunks.delta({"role": "assistant", "content": ""}, index=index))
            for part in tables(object_of(candidate.get("content")).get("parts")) or []:
                made += [chunks.delta(delta, index=index) for delta in self._deltas(part, index)]
            finish = _finish(candidate.get("finishReason"), called=index in self._called)
            if finish is not None:
                finished = True
                made.append(chunks.delta({}, finish, index))
        return [*made, chunks.usage(_usage(event))] if finished else made

    def _deltas(self, part: dict[str, Any], index: int) -> list[dict[str, Any]]:
        """Return the deltas of a part of a candidate: its text or tool call, and the signature of the text."""
        call, text, signature = table(part.get("functionCall")), part.get("text"), part.get("thoughtSignature")
        extra = {} if signature is None else {"extra_content": {"google": {"thought_signature": signature}}}
        if call is not None:
            self._called.add(index)
            identifier, arguments = str(call.get("id") or new_id("call")), arguments_of(call.get("args"))
            made = tool_call(identifier, str(call.get("name")), arguments, **extra)
            return [{"tool_calls": self._chunks.entries("tool_calls", [made], index)}]
        said = {"reasoning_content" if part.get("thought") else "content": text} if isinstance(text, str) else {}
        return [delta for delta in (said, extra) if any(delta.values())]


def _candidates(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the candidate answers. A blocked prompt counts as one filtered answer."""
    candidates = tables(body.get("candidates")) or []
    blocked = object_of(body.get("promptFeedback")).get("blockReason")
    return [{"finishReason": blocked}] if blocked and not candidates else candidates


def _finish(reason: Any, *, called: bool) -> str | None:
    if reason is None:
        return None
    finish = _FINISHES.get(str(reason), "content_filter")
    return "tool_calls" if called and finish == "stop" else finish


def _usage(body: dict[str, Any]) -> dict[str, Any]:
    """Convert token counts to OpenAI's form. Thoughts are billed as output."""
    counts = object_of(body.get("usageMetadata"))
    thought = whole(counts.get("thoughtsTokenCount"))
    read = whole(counts.get("promptTokenCount")) + whole(counts.get("toolUsePromptTokenCount"))
    written = whole(counts.get("candidatesTokenCount")) + thought
    cached = whole(counts.get("cachedContentTokenCount"))
    return usage_of(read, written, cached, completion_tokens_details={"reasoning_tokens": thought})
