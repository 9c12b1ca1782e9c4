"""Translation of Gemini's answers, whole or streamed, to chat completion chunks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ....protocol.http.wire import new_id
from ...request.json_narrowing import object_of, table, tables
from .provider import ChatEvents, ChunkMaker, arguments_of, tool_call, usage_of, whole

_FINISHES = {"STOP": "stop", "MAX_TOKENS": "length"}  # all other reasons mean that content was withheld

#: Fields of parts that have an equivalent, or that describe another field.
_KNOWN = frozenset(("text", "thought", "thoughtSignature", "functionCall", "partMetadata", "mediaResolution"))


@dataclass(slots=True)
class _Candidate:
    """State of one candidate answer."""

    # Whether the candidate has called a tool.
    called: bool = False
    # Kind of each part so far ("text", "thought" or ""), and its text if the text is content.
    parts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    # Latest `groundingMetadata`.
    grounding: dict[str, Any] = field(default_factory=dict[str, Any])
    # All `citationSources`.
    sources: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    # Fields of parts without an equivalent, in order.
    lost: dict[str, None] = field(default_factory=dict[str, None])

    def add(self, part: dict[str, Any], *, is_first: bool) -> None:
        """Add a part. The first part of an event continues the part before it if both have one kind."""
        kind = "thought" if part.get("thought") else "text" if isinstance(part.get("text"), str) else ""
        text = part["text"] if kind == "text" else ""
        if is_first and kind and self.parts and self.parts[-1][0] == kind:
            text = self.parts.pop()[1] + text
        self.parts.append((kind, text))
        self.lost |= dict.fromkeys(name for name in part if name not in _KNOWN)

    def annotations(self) -> list[dict[str, Any]]:
        """Return the citations as OpenAI's annotations, with places in the joined text."""
        chunks = tables(self.grounding.get("groundingChunks")) or []
        made = [
            _annotation(chunk, *self._place(object_of(support.get("segment"))))
            for support in tables(self.grounding.get("groundingSupports")) or []
            for index, chunk in enumerate(chunks)
            if isinstance(cited := support.get("groundingChunkIndices"), list) and index in cited
        ]
        content = "".join(text for _, text in self.parts)
        made += [_annotation({"web": source}, *_span(content, source)) for source in self.sources]
        return [each for each in made if each["url_citation"]["url"]]

    def _place(self, segment: dict[str, Any]) -> tuple[int, int]:
        """Return the place of a segment. Its byte offsets count from the start of its part."""
        at = whole(segment.get("partIndex"))
        before = sum(len(text) for _, text in self.parts[:at])
        begin, end = _span("".join(text for _, text in self.parts[at : at + 1]), segment)
        return before + begin, before + end


def _span(text: str, segment: dict[str, Any]) -> tuple[int, int]:
    """Return the start and end of a segment in characters, from its offsets in bytes."""
    encoded = text.encode("utf-8", "surrogatepass")
    begin, end = (
        len(encoded[: whole(segment.get(name))].decode("utf-8", "ignore")) for name in ("startIndex", "endIndex")
    )
    return begin, end


def _annotation(chunk: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    source = object_of(next((chunk[name] for name in ("web", "retrievedContext", "maps") if chunk.get(name)), None))
    cited = {"url": str(source.get("uri") or ""), "title": str(source.get("title") or "")}
    return {"type": "url_citation", "url_citation": {**cited, "start_index": begin, "end_index": end}}


class ContentEvents(ChatEvents):
    """Translator of one answer. Each event of a stream is an answer object that contains only new parts."""

    def __init__(self) -> None:
        self._chunks = ChunkMaker()
        self._candidates: dict[int, _Candidate] = {}

    def read(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        chunks, finished = self._chunks, False
        chunks.id, chunks.model = str(event.get("responseId")), str(event.get("modelVersion"))
        made: list[dict[str, Any]] = []
        for candidate in _candidates(event):
            index = whole(candidate.get("index"))
            if index not in self._candidates:
                self._candidates[index] = _Candidate()
                made.append(chunks.delta({"role": "assistant", "content": ""}, index=index))
            state = self._candidates[index]
            for number, part in enumerate(tables(object_of(candidate.get("content")).get("parts")) or []):
                state.add(part, is_first=number == 0)
                made += [chunks.delta(delta, index=index) for delta in self._deltas(part, index)]
            state.grounding = table(candidate.get("groundingMetadata")) or state.grounding
            state.sources += tables(object_of(candidate.get("citationMetadata")).get("citationSources")) or []
            finish = _finish(candidate.get("finishReason"), called=state.called)
            if finish is not None:
                finished = True
                if cited := chunks.entries("annotations", state.annotations(), index):
                    made.append(chunks.delta({"annotations": cited}, index=index))
                made.append(chunks.delta({}, finish, index))
                if state.lost:
                    made[-1]["updraft"] = {"notes": [f"parts of the answer were left out: {', '.join(state.lost)}"]}
        return [*made, chunks.usage(_usage(event))] if finished else made

    def _deltas(self, part: dict[str, Any], index: int) -> list[dict[str, Any]]:
        """Return the deltas of a part of a candidate: its text or tool call, and the signature of the text."""
        call, text, signature = table(part.get("functionCall")), part.get("text"), part.get("thoughtSignature")
        extra = {} if signature is None else {"extra_content": {"google": {"thought_signature": signature}}}
        if call is not None:
            self._candidates[index].called = True
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
