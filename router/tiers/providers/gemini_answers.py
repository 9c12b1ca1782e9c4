"""Translation of Gemini's answers and streams to chat completions."""

from __future__ import annotations

from typing import Any

from ....protocol.http.ids import new_id
from ...request.json_narrowing import table, tables
from .chunks import ChunkMaker, arguments_of, completion, message, tool_call, usage_of, whole
from .provider import ChatEvents

_FINISHES = {"STOP": "stop", "MAX_TOKENS": "length"}  # all other reasons mean that content was withheld


def completion_of(body: dict[str, Any]) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for candidate in _candidates(body):
        texts, reasoning, calls, extra = _content(candidate)
        finish = _finish(candidate.get("finishReason"), called=bool(calls))
        said = message(texts, reasoning, calls) | extra
        choices.append({"index": whole(candidate.get("index")), "message": said, "finish_reason": finish})
    return completion(body.get("responseId"), body.get("modelVersion"), choices, _usage(body))


class ContentEvents(ChatEvents):
    """Translator of one stream's events. Each event is an answer object that contains only new parts."""

    def __init__(self) -> None:
        self._chunks = ChunkMaker()
        self._called: set[int] = set()  # candidates with tool calls

    def read(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        chunks, finished = self._chunks, False
        chunks.id, chunks.model = str(event.get("responseId")), str(event.get("modelVersion"))
        made: list[dict[str, Any]] = []
        for candidate in _candidates(event):
            index = whole(candidate.get("index"))
            texts, reasoning, calls, extra = _content(candidate)
            made += [chunks.delta({"reasoning_content": thought}, index=index) for thought in reasoning if thought]
            made += [chunks.delta({"content": text}, index=index) for text in texts if text]
            made += [chunks.delta(extra, index=index)] if extra else []
            if calls:
                self._called.add(index)
                made.append(chunks.delta({"tool_calls": calls}, index=index))
            finish = _finish(candidate.get("finishReason"), called=index in self._called)
            if finish is not None:
                finished = True
                made.append(chunks.delta({}, finish, index))
        return [*made, chunks.usage(_usage(event))] if finished else made


def _candidates(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the candidate answers. A blocked prompt counts as one filtered answer."""
    candidates = tables(body.get("candidates")) or []
    blocked = (table(body.get("promptFeedback")) or {}).get("blockReason")
    return [{"finishReason": blocked}] if blocked and not candidates else candidates


def _content(candidate: dict[str, Any]) -> tuple[list[str], list[str], list[dict[str, Any]], dict[str, Any]]:
    """Return the candidate's texts, thoughts, tool calls, and the field with the signature of its text."""
    extra: dict[str, Any] = {}
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in tables((table(candidate.get("content")) or {}).get("parts")) or []:
        call, signature = table(part.get("functionCall")), part.get("thoughtSignature")
        more = {} if signature is None else {"extra_content": {"google": {"thought_signature": signature}}}
        if call is not None:
            arguments = arguments_of(call.get("args"))
            calls.append(tool_call(str(call.get("id") or new_id("call")), str(call.get("name")), arguments, **more))
            continue
        extra |= more
        if isinstance(part.get("text"), str):
            (reasoning if part.get("thought") else texts).append(part["text"])
    return texts, reasoning, calls, extra


def _finish(reason: Any, *, called: bool) -> str | None:
    if reason is None:
        return None
    finish = _FINISHES.get(str(reason), "content_filter")
    return "tool_calls" if called and finish == "stop" else finish


def _usage(body: dict[str, Any]) -> dict[str, Any]:
    """Convert token counts to OpenAI's form. Thoughts are billed as output."""
    counts = table(body.get("usageMetadata")) or {}
    thought = whole(counts.get("thoughtsTokenCount"))
    read = whole(counts.get("promptTokenCount")) + whole(counts.get("toolUsePromptTokenCount"))
    written = whole(counts.get("candidatesTokenCount")) + thought
    cached = whole(counts.get("cachedContentTokenCount"))
    return usage_of(read, written, cached, completion_tokens_details={"reasoning_tokens": thought})
