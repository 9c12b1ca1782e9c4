"""Translation of chat completions, whole or streamed, to Response objects and stream events; compaction."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

import msgspec

from ..decoding import read_object
from ..errors import UpstreamError, invalid_value
from ..hints import storable
from ..http.lenient_json import json_of, object_of, objects_of
from .chat_chunks import (
    PAUSES,
    add_details,
    are_complete,
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
from .responses_items import Item, compaction_of, item_id, items_of, since_compaction
from .responses_request import ResponsesRequest, TextOptions, chat_body, read_responses_request

_Kind = Literal["output_text", "refusal", "reasoning_text", "function_call_arguments", "custom_tool_call_input"]
#: Field of each kind's `.done` event that holds the whole text.
_WHOLE = {
    "output_text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "function_call_arguments": "arguments",
    "custom_tool_call_input": "input",
}
_ECHOED = (
    "instructions", "previous_response_id", "background", "max_output_tokens", "max_tool_calls", "tool_choice",
    "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
#: Default values of fields that OpenAI always reports.
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "top_logprobs": 0}
_EFFECTIVE = ("temperature", "top_p", "service_tier")  # reported by the model that answers
_NO_DETAILS = {"description": None, "parameters": None, "strict": False}
_INCOMPLETE = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
    **{reason: reason for reason in PAUSES},
}
_ASK = (
    "Summarize this conversation for a colleague who will continue it. Keep names, numbers, decisions, results of "
    "tools and open tasks. Write only the summary."
)


def begun_response(request: ResponsesRequest, *, stored: bool) -> dict[str, Any]:
    """Build the Response object of an answer in progress."""
    return {
        "id": f"resp_{secrets.token_hex(24)}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "model": request.model,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **{name: getattr(request, name) for name in _ECHOED},
        **{name: value if (given := getattr(request, name)) is None else given for name, value in _DEFAULTS.items()},
        "metadata": storable(request.metadata),
        "service_tier": "default",
        "tools": [{**_NO_DETAILS, **tool} if tool.get("type") == "function" else tool for tool in request.tools],
        "conversation": None if request.conversation_id is None else {"id": request.conversation_id},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None, **object_of(request.reasoning)},
        "store": stored,
        "text": {"format": request.text.format, "verbosity": request.text.verbosity or "medium"},
        "truncation": "disabled",
    }


@dataclass(slots=True)
class _OpenItem:
    """Output item whose last part is still growing."""

    item: Item
    output_index: int
    kind: _Kind
    content_index: int = 0
    pieces: list[str] = field(default_factory=list[str])
    logprobs: list[Item] = field(default_factory=list[Item])
    annotations: list[Item] = field(default_factory=list[Item])
    # Place of the part in the text of the whole answer, in characters.
    begin_at: int = 0

    @property
    def has_parts(self) -> bool:
        return self.kind not in ("function_call_arguments", "custom_tool_call_input")

    @property
    def is_open(self) -> bool:
        return self.item["status"] == "in_progress"

    def may_end(self) -> bool:
        """Return whether a call may be complete. Pieces of several functions' calls may alternate."""
        return self.kind == "custom_tool_call_input" or are_complete("".join(self.pieces))

    @property
    def part(self) -> Item:
        text = "".join(self.pieces)
        if self.kind == "output_text":
            return {"type": self.kind, "text": text, "annotations": self.annotations, "logprobs": self.logprobs}
        return {"type": self.kind, _WHOLE[self.kind]: text}


class ResponseEvents:
    """Converter from chat chunks to `response` and to encoded stream events. Call `begin`, `read` for each chunk, then
    `end`, or `fail` at any time. Each returns the events to send, numbered from `sequence` on."""

    def __init__(self, response: dict[str, Any], sequence: int = 0) -> None:
        self.response = response
        self._events: list[bytes] = []
        self._sequence = sequence
        self._text: _OpenItem | None = None
        self._calls: dict[int, _OpenItem] = {}
        self._state: dict[str, Any] = {}  # fields for `_seal` to send
        self._finish_reason: str | None = None
        self._num_chars = 0  # characters in the answer's text so far
        self._num_lost = 0  # citations without an equivalent

    def begin(self) -> list[bytes]:
        made: list[Item] = self.response["output"]
        self.response["output"] = []
        for kind in ("created", "in_progress"):
            self._emit(f"response.{kind}", response=self.response)
        for index, item in enumerate(made):  # a compaction, made before the answer
            for kind in ("added", "done"):
                self._emit(f"response.output_item.{kind}", output_index=index, item=item)
        self.response["output"] = made
        return self._taken()

    def read(self, chunk: dict[str, Any]) -> list[bytes]:
        """Read a streamed chunk or a whole completion."""
        self.response["model"] = chunk.get("model") or self.response["model"]
        if chunk.get("updraft") is not None:
            self.response["updraft"] = chunk["updraft"]
        used = {**object_of(chunk.get("sampling")), "service_tier": chunk.get("service_tier")}
        self.response |= {name: used[name] for name in _EFFECTIVE if used.get(name) is not None}
        if usage := object_of(chunk.get("usage")):
            self.response["usage"] = usage_of(usage)
        for choice in first_choices(chunk):
            logprobs = objects_of(object_of(choice.get("logprobs")).get("content"))
            for delta in deltas_of(choice):
                self._read_delta(delta, logprobs)
            stopped_by: Any = choice.get("stop_reason")
            reason = stopped_by if stopped_by in PAUSES else choice.get("finish_reason")
            self._finish_reason = reason or self._finish_reason
        return self._taken()

    def _read_delta(self, delta: dict[str, Any], logprobs: list[Item]) -> None:
        if "extra_content" in self._state and "annotations" not in delta:  # the signature of the part before this delta
            self._seal()
        self._emit_text("reasoning_text", reasoning_of(delta))
        for name, add in (("thinking_blocks", list[Item].extend), ("reasoning_details", add_details)):
            if given := objects_of(delta.get(name)):
                add(self._state.setdefault(name, []), given)
        if delta.get("content") or delta.get("tool_calls"):
            self._seal()
        self._state |= {name: delta[name] for name in ("extra_content",) if delta.get(name)}
        self._emit_text("output_text", text_of(delta.get("content")), logprobs)
        self._annotate(delta)
        self._emit_text("refusal", text_of(delta.get("refusal")))
        for index, call in calls_of(delta):
            self._call(index, call)

    def end(self) -> list[bytes]:
        """Finish the response, or fail it if no chunk had a finish reason."""
        if self._finish_reason is None:
            return self.fail({"message": "The answer ended without a finish reason."})
        reason = _INCOMPLETE.get(self._finish_reason)
        if self._text is None and not self._calls and reason is None:
            self._open_text("output_text")
        return self.finish(reason)

    def finish(self, reason: str | None) -> list[bytes]:
        """Finish the response, even without output. `reason`: why it is incomplete."""
        status, details = ("completed", None) if reason is None else ("incomplete", {"reason": reason})
        self._seal()
        self._close_all(status)
        if self._num_lost:
            note = f"citations without a URL were left out: {self._num_lost}"
            self.response |= with_notes(self.response, note)
        self.response |= {"status": status, "completed_at": int(time.time()), "incomplete_details": details}
        self._emit(f"response.{status}", response=self.response)
        return self._taken()

    def fail(self, error: dict[str, Any]) -> list[bytes]:
        """Finish the response with an OpenAI error."""
        self._close_all("incomplete")
        limited = error.get("type") == "rate_limit_error" or error.get("code") == "rate_limit_exceeded"
        code = "rate_limit_exceeded" if limited else "server_error"
        self.response |= {"status": "failed", "error": {"code": code, "message": str(error.get("message"))}}
        self._emit("response.failed", response=self.response)
        return self._taken()

    def _emit_text(self, kind: _Kind, text: str, logprobs: Sequence[Item] = ()) -> None:
        if not text and not logprobs:
            return
        opened = self._text if self._text is not None and self._text.kind == kind else self._open_text(kind)
        shown = [_logprob(each) for each in logprobs]
        opened.pieces.append(text)
        self._num_chars += len(text) if kind == "output_text" else 0
        opened.logprobs += shown
        extra = {"logprobs": shown} if kind == "output_text" else {}
        self._emit(f"response.{kind}.delta", **self._place(opened), delta=text, **extra)

    def _open_text(self, kind: _Kind) -> _OpenItem:
        """Start a part of the open message if `kind` belongs in a message and one is open; else start a new item."""
        before = self._text
        if before is not None and "reasoning_text" not in (kind, before.kind):
            self._close_part(before)
            self._text = _OpenItem(before.item, before.output_index, kind, len(before.item["content"]))
        else:
            if before is not None:
                self._close(before, "completed")
            item: Item = {"type": "message", "role": "assistant", "content": []}
            if kind == "reasoning_text":
                item = {"type": "reasoning", "summary": [], "content": []}
            self._text = self._add(item, kind)
        opened = self._text
        opened.begin_at = self._num_chars
        self._emit("response.content_part.added", **self._place(opened), part=opened.part)
        return opened

    def _annotate(self, delta: dict[str, Any]) -> None:
        """Add a delta's URL citations to the open text part, with indices from the start of this part."""
        opened = self._text
        urls = [object_of(each.get("url_citation")) for each in objects_of(delta.get("annotations"))]
        self._num_lost += max(0, len(citations_of(delta) or ()) - len(urls))
        if opened is None or opened.kind != "output_text":
            return
        for url in filter(None, urls):
            places = {name: max(0, count_of(url, name) - opened.begin_at) for name in ("start_index", "end_index")}
            annotation = {"type": "url_citation", **url, **places}
            index = {"annotation_index": len(opened.annotations)}
            opened.annotations.append(annotation)
            self._emit("response.output_text.annotation.added", **self._place(opened), **index, annotation=annotation)

    def _seal(self) -> None:
        """Send the cloud's `OPAQUE` fields with the open reasoning item, or else in a reasoning item without text."""
        sealed, opened = seal(self._state), self._text
        if not sealed:
            return
        self._state = {}
        if opened is not None:
            opened.item |= {"encrypted_content": sealed} if opened.kind == "reasoning_text" else {}
            self._close(opened, "completed")
            self._text = None
        if opened is None or opened.kind != "reasoning_text":
            item: Item = {"type": "reasoning", "summary": [], "content": [], "encrypted_content": sealed}
            made = self._add(item, "reasoning_text")
            made.item["status"] = "completed"
            self._emit("response.output_item.done", output_index=made.output_index, item=made.item)

    def _call(self, index: int, call: Item) -> None:
        custom = object_of(call.get("custom"))
        kind: _Kind = "custom_tool_call_input" if custom else "function_call_arguments"
        called = custom or object_of(call.get("function"))
        opened = self._calls.get(index)
        if opened is None:
            if self._text is not None:
                self._close(self._text, "completed")
                self._text = None
            item = {"type": "custom_tool_call" if custom else "function_call"}
            item |= {
                "call_id": id_of(call, f"call_{secrets.token_hex(12)}"),
                "name": called.get("name") or "",
                _WHOLE[kind]: "",
            }
            opened = self._calls[index] = self._add(item, kind)
        if (text := text_of(called.get(_WHOLE[kind]))) and opened.is_open:
            opened.pieces.append(text)
            self._emit(f"response.{opened.kind}.delta", **self._place(opened), delta=text)

    def _add(self, fields: Item, kind: _Kind) -> _OpenItem:
        """Start an item. First close the open calls, in order, up to a call whose pieces may still come."""
        for opened in takewhile(_OpenItem.may_end, self._open_calls()):
            self._close(opened, "completed")
        output: list[Item] = self.response["output"]
        item = {"id": item_id(fields["type"]), "status": "in_progress", **fields}
        output.append(item)
        self._emit("response.output_item.added", output_index=len(output) - 1, item=item)
        return _OpenItem(item, len(output) - 1, kind)

    def _close_part(self, opened: _OpenItem) -> None:
        whole = {_WHOLE[opened.kind]: "".join(opened.pieces)}
        if not opened.has_parts:
            opened.item |= whole
            name = opened.item["name"]  # required by openai clients of version 2
            self._emit(f"response.{opened.kind}.done", **self._place(opened), **whole, name=name)
            return
        extra = {"logprobs": opened.logprobs} if opened.kind == "output_text" else {}
        self._emit(f"response.{opened.kind}.done", **self._place(opened), **whole, **extra)
        self._emit("response.content_part.done", **self._place(opened), part=opened.part)
        opened.item["content"].append(opened.part)

    def _close(self, opened: _OpenItem, status: str) -> None:
        self._close_part(opened)
        opened.item["status"] = status
        self._emit("response.output_item.done", output_index=opened.output_index, item=opened.item)

    def _close_all(self, status: str) -> None:
        """Close all open items. Only the last item gets `status`, since earlier items are complete."""
        still_open = [*([] if self._text is None else [self._text]), *self._open_calls()]
        still_open.sort(key=lambda opened: opened.output_index)
        for opened in still_open:
            self._close(opened, status if opened is still_open[-1] else "completed")
        self._text, self._calls = None, {}

    def _open_calls(self) -> list[_OpenItem]:
        return [opened for opened in self._calls.values() if opened.is_open]

    def _place(self, opened: _OpenItem) -> dict[str, Any]:
        place = {"item_id": opened.item["id"], "output_index": opened.output_index}
        return {**place, "content_index": opened.content_index} if opened.has_parts else place

    def _emit(self, kind: str, **fields: Any) -> None:
        self._events.append(framed({"type": kind, "sequence_number": self._sequence, **fields}))
        self._sequence += 1

    def _taken(self) -> list[bytes]:
        events, self._events = self._events, []
        return events


def whole_response(response: dict[str, Any], completion: dict[str, Any]) -> dict[str, Any]:
    """Convert a whole completion to a Response object. Raises UpstreamError if it has no finish reason."""
    events = ResponseEvents(response)
    events.read(completion)
    events.end()
    _check(events.response)
    return events.response


async def streamed_response(
    response: dict[str, Any], payloads: AsyncIterator[bytes]
) -> AsyncGenerator[tuple[list[bytes], dict[str, Any]]]:
    """Yield batches of events with the response so far, from the payloads of a chat stream. Raises UpstreamError."""
    events = ResponseEvents(response)
    yield events.begin(), response
    async for payload in payloads:
        chunk = object_of(json_of(payload, exact=True))
        if error := object_of(chunk.get("error")):
            yield events.fail(error), response
            return
        if made := events.read(chunk):
            yield made, response
    yield events.end(), response
    _check(response)


def _check(response: dict[str, Any]) -> None:
    """Raise UpstreamError if the response has failed."""
    if response["status"] == "failed":
        raise UpstreamError(response["error"]["message"])


def usage_of(counted: dict[str, Any]) -> dict[str, Any]:
    read, written = count_of(counted, "prompt_tokens"), count_of(counted, "completion_tokens")
    inputs = object_of(counted.get("prompt_tokens_details"))
    details = {name: count_of(inputs, name) for name in ("cached_tokens", "cache_write_tokens")}
    reasoned = count_of(object_of(counted.get("completion_tokens_details")), "reasoning_tokens")
    return {
        "input_tokens": read,
        "input_tokens_details": details,
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": read + written,
    }


def _logprob(token: Item) -> Item:
    tops: list[Item] = [{**top, "bytes": top.get("bytes") or []} for top in objects_of(token.get("top_logprobs"))]
    return {**token, "bytes": token.get("bytes") or [], "top_logprobs": tops}


def read_compact_request(body: bytes) -> ResponsesRequest:
    """Check the body of `POST /v1/responses/compact`. Raises InvalidRequestError, for example without a model."""
    fields = read_object(body)
    if fields.get("model") is None:
        raise invalid_value("model", "is required")
    return read_responses_request({**fields, "stream": False})


def summary_body(request: ResponsesRequest, items: Sequence[Item]) -> bytes:
    """Return the body of the chat request for a summary of `items`."""
    plain: dict[str, Any] = {"stream": False, "tool_choice": "none", "text": TextOptions(), "include": None}
    asked = msgspec.structs.replace(request, **plain, max_output_tokens=None, top_logprobs=None)
    return msgspec.json.encode(chat_body(asked, [*items, *items_of(_ASK)]))


def compaction_by(completion: dict[str, Any], rest: Sequence[Item] = (), *, private: bool = False) -> Item:
    """Return an item that stands for the summary in `completion` and for `rest`. `private`: whether the conversation
    must stay on the device. Raises UpstreamError."""
    messages = [object_of(choice.get("message")) for choice in objects_of(completion.get("choices"))]
    summary = "".join(text_of(message.get("content")) for message in messages)
    if not summary.strip():
        raise UpstreamError("The model wrote no summary of the conversation. Try again, or use another model.")
    return compaction_of([*items_of(f"Summary of the conversation so far:\n{summary}"), *rest], private=private)


def compacted_response(completion: dict[str, Any], *, private: bool = False) -> dict[str, Any]:
    """Return the answer to a compact request. Raises UpstreamError if the model wrote no summary."""
    return {
        "id": f"resp_{secrets.token_hex(24)}",
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [compaction_by(completion, private=private)],
        "usage": usage_of(object_of(completion.get("usage"))),
    }


def split_for_compaction(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Return the items to summarize, and the rest from the last user message on, which must stay unchanged."""
    whole = since_compaction(items)
    at = max((index for index, item in enumerate(whole) if item.get("role") == "user"), default=0)
    return whole[:at], whole[at:]
