"""Translation of chat completions, whole or streamed, to Anthropic messages and stream events."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import UpstreamError
from ..http.lenient_json import json_bytes, json_of, object_of, objects_of
from ..http.sse import TranslatedBody
from ..http.wire import WireResponse, anthropic_error
from .chat_chunks import (
    PAUSES,
    UNFINISHED,
    add_details,
    are_complete,
    arguments_of,
    blocks_of,
    calls_of,
    citations_of,
    count_of,
    deltas_of,
    first_choices,
    framed,
    id_of,
    reasoning_of,
    seal,
    text_of,
    with_notes,
)
from .messages_request import MessagesRequest

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
#: Initial fields of each kind of content block.
_BEGUN: dict[str, dict[str, Any]] = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}
#: Type of the deltas of each kind of block, and the field that holds their text.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class AnthropicEvents:
    """Converter from chat chunks to `message` and to encoded stream events.

    Call `begin`, `read` for each chunk, then `end`; each returns the events to send. Anthropic's streams have only one
    open block: if pieces of a tool call alternate with others, the others are buffered until the call is complete.
    """

    def __init__(self, request: MessagesRequest, prompt_tokens: int = 0) -> None:
        self.message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage({"prompt_tokens": prompt_tokens}),
        }
        self._stop_sequences = request.stop_sequences
        self._events: list[bytes] = []
        self._texts: list[str] = []  # pieces of the open block
        self._open: dict[str, Any] | None = None
        self._call: int | None = None  # index of the call in the open block
        self._calls: dict[int, dict[str, Any]] = {}  # blocks by index of the call
        self._custom: set[int | None] = set()  # indices of the calls of custom tools
        self._waiting: dict[int, str] = {}  # buffered arguments of calls whose blocks have not started
        self._held: list[dict[str, Any]] = []  # buffered text and other fields of deltas
        self._state: dict[str, Any] = {}  # fields for `_seal` to send
        self._refused = False
        self._finish_reason: str | None = None
        self._unfinished: str | None = None  # the one of `UNFINISHED` that ended the answer

    def begin(self) -> list[bytes]:
        self._emit("message_start", message=self.message)
        self._emit("ping")
        return self._taken()

    def read(self, chunk: dict[str, Any]) -> list[bytes]:
        """Read a chunk or a whole completion. Raises UpstreamError if the model continues a finished tool call."""
        self.message["model"] = chunk.get("model") or self.message["model"]
        if chunk.get("updraft") is not None:
            self.message["updraft"] = chunk["updraft"]
        if usage := object_of(chunk.get("usage")):
            self.message["usage"] = _usage(usage)
        for choice in first_choices(chunk):
            for delta in deltas_of(choice):
                self._read_delta(self._without_held(delta))
            if self._held and not self._is_in_call():
                self._release()
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            stopped_by: Any = choice.get("stop_reason")
            if choice.get("finish_reason") == "length" and stopped_by in UNFINISHED:
                self._unfinished = stopped_by
            if stopped_by in self._stop_sequences or choice.get("stop_sequence"):  # a cloud may have its own sequences
                self.message["stop_sequence"] = stopped_by
        return self._taken()

    def _read_delta(self, delta: dict[str, Any]) -> None:
        has_signature = "extra_content" in self._state and "annotations" not in delta
        if has_signature and (self._call is None or are_complete("".join(self._texts))):
            self._seal()  # first send the signature of the part before this delta
        signed = objects_of(delta.get("thinking_blocks"))
        if not any(block.get("thinking") for block in signed):
            self._emit_text("thinking", reasoning_of(delta))
        for block in signed:
            self._sign(block)
        if details := objects_of(delta.get("reasoning_details")):
            add_details(self._state.setdefault("reasoning_details", []), details)
        if self._call is None and (delta.get("content") or delta.get("tool_calls")):
            self._seal()
        self._state |= {name: delta[name] for name in ("extra_content",) if delta.get(name)}
        self._emit_text("text", text_of(delta.get("content")))
        self._cite(delta)
        if refusal := text_of(delta.get("refusal")):
            self._refused = True
            self._emit_text("text", refusal)
        for index, call in calls_of(delta):
            self._add_to_call(index, call)

    def end(self) -> list[bytes]:
        """Finish the message. Raises UpstreamError if no chunk had a finish reason."""
        if self._finish_reason is None:
            raise UpstreamError("The answer ended without a finish reason.")
        self._begin_waiting(at_end=True)
        self._release()
        self._close()
        self._seal()
        notes, cut = list[str](), self._finish_reason == "length" and self._unfinished not in PAUSES
        for block in self.message["content"]:
            if block["type"] == "tool_use":
                block["input"], changes = arguments_of(block["name"], block["input"], cut=cut)
                notes += changes
        message = self.message = with_notes(self.message, *notes)
        reason = _STOP_REASONS.get(self._finish_reason, "end_turn")
        if reason in ("end_turn", "tool_use"):  # some clouds end tool calls with `stop`
            reason = "tool_use" if any(block["type"] == "tool_use" for block in message["content"]) else "end_turn"
            reason = reason if message["stop_sequence"] is None else "stop_sequence"
        message["stop_reason"] = "refusal" if self._refused else self._unfinished or reason
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        extension = {"updraft": message["updraft"]} if "updraft" in message else {}
        self._emit("message_delta", delta=delta, usage=message["usage"], **extension)
        self._emit("message_stop")
        return self._taken()

    def _without_held(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Buffer a delta's text and other fields while a call is incomplete. Return the delta without these fields."""
        fields = {name: value for name, value in delta.items() if value and name not in ("role", "tool_calls")}
        if not fields or not self._is_in_call():
            return delta
        self._held.append(fields)
        return {"tool_calls": delta.get("tool_calls")}

    def _is_in_call(self) -> bool:
        """Return whether the open block is a call whose arguments are incomplete."""
        return self._call not in (None, *self._custom) and not are_complete("".join(self._texts))

    def _release(self) -> None:
        held, self._held = self._held, []
        for delta in held:
            self._read_delta(delta)

    def _emit_text(self, kind: str, text: str) -> None:
        if not text:
            return
        if self._open is None or self._open["type"] != kind:
            self._begin_block({"type": kind, **_BEGUN[kind]})
        self._grow(text)

    def _cite(self, delta: dict[str, Any]) -> None:
        """Add a delta's citations to the open text block. Anthropic's list of them ends the block, even if empty."""
        own, opened = citations_of(delta), self._open
        if opened is None or opened["type"] != "text":
            return
        urls = [object_of(each.get("url_citation")) for each in objects_of(delta.get("annotations"))]
        for citation in [_web_citation(url) for url in urls if url] if own is None else own:
            opened["citations"] = [*opened.get("citations", ()), citation]
            place = len(self.message["content"])
            self._emit("content_block_delta", index=place, delta={"type": "citations_delta", "citation": citation})
        if own is not None:
            self._close()

    def _sign(self, block: dict[str, Any]) -> None:
        """Send a block that only Anthropic reads: of a thought, its text only if that was not yet streamed."""
        opened = self._open
        if block.get("type") in ("redacted_thinking", "compaction"):
            self._begin_block({name: value for name, value in block.items() if name != "index"})
        else:
            if opened is None or opened["type"] != "thinking":
                self._begin_block(opened := {"type": "thinking", **_BEGUN["thinking"]})
                self._grow(text_of(block.get("thinking")))
            opened["signature"] = text_of(block.get("signature"))
            delta = {"type": "signature_delta", "signature": opened["signature"]}
            self._emit("content_block_delta", index=len(self.message["content"]), delta=delta)
        self._close()

    def _seal(self) -> None:
        """Send the cloud's `OPAQUE` fields in a redacted thinking block, as Anthropic's API has no fields for them."""
        if sealed := seal(self._state):
            self._state = {}
            self._sign(blocks_of(sealed)[0])

    def _add_to_call(self, index: int, call: dict[str, Any]) -> None:
        function, custom = object_of(call.get("function")), object_of(call.get("custom"))
        text, name = text_of(function.get("arguments")), function.get("name") or custom.get("name") or ""
        if custom:  # the text of a custom tool becomes the argument `input`
            text = json_bytes(text_of(custom.get("input"))).decode()[1:-1]
        if custom and index not in self._calls:
            self._custom.add(index)
            text = '{"input":"' + text
        if index not in self._calls:
            call_id = id_of(call, f"toolu_{secrets.token_hex(12)}")
            self._calls[index] = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
            self._waiting[index] = ""
        if index in self._waiting:
            self._waiting[index] += text
            self._begin_waiting()
        elif index != self._call:
            raise UpstreamError("The model continued a tool call that was already complete.")
        elif text:
            self._grow(text)
            self._begin_waiting()

    def _begin_waiting(self, *, at_end: bool = False) -> None:
        """Start the blocks of buffered calls. A block starts once the arguments of the previous call are complete."""
        while self._waiting and (at_end or self._call is None or are_complete("".join(self._texts))):
            index = next(iter(self._waiting))
            text = self._waiting.pop(index)
            self._begin_block(self._calls[index])
            self._call = index
            if text:
                self._grow(text)

    def _begin_block(self, block: dict[str, Any]) -> None:
        self._close()
        self._open = block
        self._emit("content_block_start", index=len(self.message["content"]), content_block=block)

    def _grow(self, text: str) -> None:
        assert self._open is not None, "no open block"
        kind, name = _DELTAS[self._open["type"]]
        self._texts.append(text)
        self._emit("content_block_delta", index=len(self.message["content"]), delta={"type": kind, name: text})

    def _close(self) -> None:
        if self._call in self._custom:
            self._grow('"}')
        block, text = self._open, "".join(self._texts)
        if block is None:
            return
        self._emit("content_block_stop", index=len(self.message["content"]))
        if block["type"] in _DELTAS:
            block["input" if block["type"] == "tool_use" else block["type"]] = text
        self.message["content"].append(block)
        self._open, self._call, self._texts = None, None, []

    def _emit(self, kind: str, **fields: Any) -> None:
        self._events.append(framed({"type": kind, **fields}))

    def _taken(self) -> list[bytes]:
        events, self._events = self._events, []
        return events


def _web_citation(url: dict[str, Any]) -> dict[str, Any]:
    """Convert OpenAI's `url_citation`, which has neither the cited text nor Anthropic's encrypted index."""
    named = {"url": url.get("url"), "title": url.get("title")}
    return {"type": "web_search_result_location", **named, "cited_text": "", "encrypted_index": ""}


def whole_message(request: MessagesRequest, completion: dict[str, Any]) -> dict[str, Any]:
    """Convert a whole completion. Raises UpstreamError if it has no finish reason."""
    events = AnthropicEvents(request)
    events.read(completion)
    events.end()
    return events.message


def message_of(request: MessagesRequest, answer: WireResponse, count: Callable[[], Awaitable[int]]) -> WireResponse:
    """Translate a successful chat answer. `count` returns the number of prompt tokens. Raises UpstreamError."""
    if isinstance(answer.body, bytes):
        return WireResponse.json(whole_message(request, json_of(answer.body, exact=True)), headers=answer.headers)
    events = partial(_streamed, request, count)
    body = TranslatedBody(answer.body, events, lambda error: framed(anthropic_error(error.to_body()["error"])))
    return replace(answer, body=body)


async def _streamed(
    request: MessagesRequest, count: Callable[[], Awaitable[int]], payloads: AsyncIterator[bytes]
) -> AsyncGenerator[bytes]:
    """Yield the events of a message. The first event has the result of `count`; the last has the cloud's usage."""
    events = AnthropicEvents(request, await count())
    yield b"".join(events.begin())
    async for payload in payloads:
        chunk = object_of(json_of(payload, exact=True))
        if error := object_of(chunk.get("error")):
            yield framed(anthropic_error(error))
            return
        if made := events.read(chunk):
            yield b"".join(made)
    yield b"".join(events.end())


def _usage(counted: dict[str, Any]) -> dict[str, Any]:
    """Convert token counts. Unlike in OpenAI's usage, `input_tokens` excludes tokens read from or written to caches."""
    read, written = count_of(counted, "prompt_tokens"), count_of(counted, "completion_tokens")
    details = object_of(counted.get("completion_tokens_details"))
    inputs = object_of(counted.get("prompt_tokens_details"))
    cached = min(count_of(inputs, "cached_tokens"), read)
    stored = min(count_of(inputs, "cache_write_tokens"), read - cached)
    stored_1h = min(count_of(inputs, "cache_write_1h_tokens"), stored)
    by_time = {"ephemeral_5m_input_tokens": stored - stored_1h, "ephemeral_1h_input_tokens": stored_1h}
    return {
        "input_tokens": read - cached - stored,
        "cache_creation": by_time,
        "cache_creation_input_tokens": stored,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
        "output_tokens_details": {"thinking_tokens": count_of(details, "reasoning_tokens")},
    }
