"""Chat messages in pieces: assembly of streamed chunks, the order of a message's parts, and the signatures of clouds.

The fields of a chat message have one order: reasoning, text, tool calls. A message that was written in another order
also has the field `deltas`: its parts as messages in that one order. Signatures, which clouds add to reasoning and tool
calls, travel in texts and IDs through APIs that have no field for them.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

import jiter
import msgspec

from ..http.lenient_json import json_bytes, json_line, json_of, object_of, objects_of, raw_object

#: Fields whose texts or lists are concatenated across chunks. For other fields the last non-empty value counts.
_TEXTS = ("content", "refusal", "reasoning_content", "reasoning", "arguments", "input")
_LISTS = ("thinking_blocks", "annotations", "citations")  # each chunk adds complete entries
#: Anthropic's stop reasons of answers that continue when the caller sends them back. Chat choices have them, too.
PAUSES = ("pause_turn", "compaction")
#: Fields with the stop sequence that ended an answer: vLLM's, which also names other reasons, and Anthropic's.
_STOPPED = ("stop_reason", "stop_sequence")
#: All stop reasons of unfinished answers.
UNFINISHED = (*PAUSES, "model_context_window_exceeded")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
#: Fields of chat messages that only the cloud that wrote them can read: Anthropic's, OpenRouter's and Google's.
OPAQUE = ("thinking_blocks", "reasoning_details", "extra_content")
_SEALED = "updraft-state-1."
_IN_ID = "__updraft_"
#: Fields in the order in which readers take them from a message.
_ORDER = ("reasoning_content", "thinking_blocks", "content", "annotations", "citations", "extra_content", "tool_calls")
#: Fields that end a piece: the end of a text block, and the signature of a part.
_ENDS = ("citations", "extra_content")


@dataclass(slots=True)
class _Message:
    """Message, or tool call of a message, assembled from deltas."""

    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    texts: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    calls: dict[int, _Message] = field(default_factory=dict[int, "_Message"])

    def add(self, delta: dict[str, Any]) -> None:
        for name, value in delta.items():
            if name == "tool_calls":
                for index, call in calls_of(delta):
                    self.calls.setdefault(index, _Message()).add(call)
            elif name in ("function", "custom"):
                self.add(object_of(value))
            elif name in _TEXTS and isinstance(value, str):
                self.texts.setdefault(name, []).append(value)
            elif name in _LISTS and isinstance(value, list):
                entries = [{key: part for key, part in each.items() if key != "index"} for each in objects_of(value)]
                self.fields |= {name: [*self.fields.get(name, ()), *entries]} if entries else {}
            elif name == "reasoning_details":
                add_details(self.fields.setdefault(name, []), objects_of(value))
            elif value is not None and name != "index":
                self.fields[name] = value or self.fields.get(name, value)

    def whole(self) -> dict[str, Any]:
        said = {**self.fields, **{name: "".join(pieces) for name, pieces in self.texts.items()}}
        message = {"role": "assistant", "content": None, "refusal": None, **said}
        if self.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [call.call() for call in self.calls.values()]
        return message

    def call(self) -> dict[str, Any]:
        said = {"type": "function"} | {name: value for name, value in self.fields.items() if name != "name"}
        form, field = ("custom", "input") if said["type"] == "custom" else ("function", "arguments")
        return {**said, form: {"name": self.fields.get("name"), field: "".join(self.texts.get(field, ()))}}


@dataclass(slots=True)
class _Choice:
    message: _Message = field(default_factory=_Message)
    logprobs: list[Any] = field(default_factory=list[Any])
    finish_reason: str | None = None
    # Values of the fields in `_STOPPED`.
    stopped: dict[str, Any] = field(default_factory=dict[str, Any])


class ChatChunks:
    """Accumulator for the chunks of one stream; `whole` returns the assembled completion."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}

    def read(self, chunk: dict[str, Any]) -> None:
        for name, value in chunk.items():
            if name != "choices" and value is not None:
                self._fields[name] = value or self._fields.get(name, value)
        for number, choice in enumerate(objects_of(chunk.get("choices"))):
            merged = self._choices.setdefault(index_of(choice, number), _Choice())
            merged.message.add(object_of(choice.get("delta")))
            merged.logprobs += objects_of(object_of(choice.get("logprobs")).get("content"))
            merged.finish_reason = choice.get("finish_reason") or merged.finish_reason
            merged.stopped |= {name: choice[name] for name in _STOPPED if choice.get(name)}

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": choice.message.whole(),
                "logprobs": {"content": choice.logprobs, "refusal": None} if choice.logprobs else None,
                "finish_reason": choice.finish_reason,
                **choice.stopped,
            }
            for index, choice in sorted(self._choices.items())
        ]
        return {**self._fields, "object": "chat.completion", "choices": choices}


def arguments_of(name: str, text: str, *, cut: bool) -> tuple[msgspec.Raw, list[str]]:
    """Return a tool call's arguments as a JSON object, and notes on what differs from the model's text.

    If the token limit `cut` the answer, the object holds the values up to there. Other text that is not an object is
    returned as `raw_arguments`, so that no tool runs with a part of its arguments.
    """
    named = f"tool_calls: the arguments of {str(name)[:100]!r}"
    if cut and not text.strip():
        return msgspec.Raw(b"{}"), [f"{named} were cut by the token limit"]
    if (whole := raw_object(text)) is not None:
        nulls, given = (_STRING.sub("", each).count("null") for each in (bytes(whole).decode(), text))
        return whole, [f"{named} hold NaN, Infinity or too large a number: null"] if nulls > given else []
    if cut:
        with suppress(ValueError):
            value = jiter.from_json(text.encode(errors="backslashreplace"), partial_mode="trailing-strings")
            if isinstance(value, dict):
                return msgspec.Raw(json_bytes(value)), [f"{named} were cut by the token limit"]
    return msgspec.Raw(json_bytes({"raw_arguments": text})), [f"{named} are not a JSON object: see raw_arguments"]


def with_notes(answer: dict[str, Any], *notes: str) -> dict[str, Any]:
    """Return `answer` with more notes in its `updraft` object."""
    about = object_of(answer.get("updraft"))
    return {**answer, "updraft": {**about, "notes": [*(about.get("notes") or ()), *notes]}} if notes else answer


def text_of(value: Any) -> str:
    """Return a string as it is, or the joined texts of content parts."""
    return value if isinstance(value, str) else "".join(text_of(part.get("text")) for part in objects_of(value))


def count_of(counts: dict[str, Any], name: str) -> int:
    value = counts.get(name)
    return value if isinstance(value, int) else 0


def framed(event: dict[str, Any]) -> bytes:
    """Encode a server-sent event with an `event:` line, as OpenAI's Responses and Anthropic's Messages use."""
    return f"event: {event['type']}\ndata: ".encode() + json_line(event) + b"\n"


def first_choices(chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the first choice of a chunk or of a whole completion, if any."""
    return (choice for choice in objects_of(chunk.get("choices")) if choice.get("index") in (0, None))


def deltas_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the delta of a streamed choice, or the message of a whole choice as deltas.

    A message has the field `deltas`, its pieces in the order of writing, only if that order is unusual. The usual
    order is reasoning, text, tool calls.
    """
    said = object_of(choice.get("delta") or choice.get("message"))
    return objects_of(said.get("deltas")) or [said]


def citations_of(delta: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return Anthropic's citations of the text block that ends with this delta, or None if no block ends here."""
    given = delta.get("citations")
    if not isinstance(given, list) or not all("type" in each for each in objects_of(given)):
        return None  # some other clouds have a field `citations` that lists URLs
    return [{name: value for name, value in each.items() if name != "index"} for each in objects_of(given)]


def reasoning_of(message: dict[str, Any]) -> str:
    return text_of(message.get("reasoning_content") or message.get("reasoning"))


def calls_of(message: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the tool calls of a message, or the pieces of calls in a delta, each after the index of the call."""
    return ((index_of(call, number), call) for number, call in enumerate(objects_of(message.get("tool_calls"))))


def content_of(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return parts as the content of a message. A single text becomes a plain string, which every server accepts."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts or ""


def are_complete(arguments: str) -> bool:
    """Return whether the arguments of a call are a whole JSON object. Empty arguments count as incomplete."""
    return arguments.rstrip().endswith("}") and raw_object(arguments) is not None


def index_of(piece: dict[str, Any], otherwise: int) -> int:
    return piece["index"] if isinstance(piece.get("index"), int) else otherwise


def seal(message: dict[str, Any]) -> str:
    """Encode the `OPAQUE` fields of a message as one text, or as "" if the message has none of these fields."""
    state = {name: message[name] for name in OPAQUE if message.get(name)}
    return _SEALED + base64.urlsafe_b64encode(json_bytes(state)).decode() if state else ""


def blocks_of(sealed: Any) -> list[dict[str, Any]]:
    """Return a thinking block that carries the result of `seal`, for `restored` to read; none for another value."""
    is_sealed = isinstance(sealed, str) and sealed.startswith(_SEALED)
    return [{"type": "redacted_thinking", "data": sealed}] if is_sealed else []


def id_of(call: dict[str, Any], otherwise: str) -> str:
    """Return the ID of a tool call, with its signature if it has one."""
    extra = object_of(call.get("extra_content"))
    written = base64.urlsafe_b64encode(json_bytes(extra)).decode().rstrip("=")
    return f"{call.get('id') or otherwise}{_IN_ID + written if extra else ''}"


def restored(message: dict[str, Any]) -> dict[str, Any]:
    """Return a chat message, and the pieces in its `deltas`, with the fields that thinking blocks and IDs carry."""
    made, blocks = dict(message), list[dict[str, Any]]()
    given = objects_of(message.get("thinking_blocks"))
    for block in given:
        if not blocks_of(block.get("data")):
            blocks.append(block)
            continue
        state = _decoded(block["data"][len(_SEALED) :])
        blocks += objects_of(state.get("thinking_blocks"))
        details = [*objects_of(made.get("reasoning_details")), *objects_of(state.get("reasoning_details"))]
        made |= {"reasoning_details": details, "extra_content": state.get("extra_content") or made.get("extra_content")}
    if given:
        made["thinking_blocks"] = blocks
    if deltas := objects_of(message.get("deltas")):
        made["deltas"] = [restored(delta) for delta in deltas]
    if isinstance(calls := message.get("tool_calls"), list):
        made["tool_calls"] = [_call(call) for call in cast("list[Any]", calls)]
    if isinstance(answered := message.get("tool_call_id"), str):
        made["tool_call_id"] = answered.partition(_IN_ID)[0]
    return {name: value for name, value in made.items() if value or name not in OPAQUE}


def add_details(details: list[dict[str, Any]], pieces: list[dict[str, Any]]) -> None:
    """Add streamed pieces of OpenRouter's `reasoning_details`. Pieces of one text are joined."""
    for piece in pieces:
        last = details[-1] if details else {"type": None}
        if "data" in piece or any(last.get(name) != piece.get(name) for name in ("type", "index")):
            details.append(piece)
            continue
        texts = {name: f"{last.get(name) or ''}{piece[name]}" for name in ("text", "summary") if piece.get(name)}
        details[-1] = last | {name: value for name, value in piece.items() if value not in (None, "")} | texts


def _call(call: Any) -> Any:
    identifier, _, state = str(object_of(call).get("id")).partition(_IN_ID)
    return {**call, "id": identifier, "extra_content": _decoded(state)} if state else call


def _decoded(text: str) -> dict[str, Any]:
    """Decode fields from Base64 of JSON. Return no fields for invalid text, which the caller has changed."""
    try:
        return object_of(json_of(base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)))
    except ValueError:
        return {}


def pieces_of(deltas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join deltas to as few pieces as possible without a change of order. Anthropic's `citations` end a text block,
    even if empty."""
    pieces, last = list[dict[str, Any]](), len(_ORDER)
    for delta in deltas:
        for place, name in enumerate(_ORDER):
            value = delta.get(name)
            if not value and not (name == "citations" and isinstance(value, list)):
                continue
            if place < last:
                pieces.append({})
            pieces[-1][name] = _joined(name, pieces[-1].get(name), value)
            last = len(_ORDER) if name in _ENDS else place
    return [_whole(piece) for piece in pieces]


def order_of(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the field `deltas` of the message that these deltas form, or no field if the message needs none."""
    pieces = pieces_of(deltas)
    return {"deltas": pieces} if len(pieces) > 1 or any("citations" in piece for piece in pieces) else {}


def message_of(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant message that the deltas form, with the deltas themselves if their order is another one. Only
    these have the citations."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for name, value in (item for delta in deltas for item in delta.items() if item[0] != "citations"):
        message[name] = _joined(name, message.get(name), value)
    return _whole(message) | ({"deltas": deltas} if order_of(deltas) else {})


def in_order(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pieces of a history's message as messages. A message whose text or calls differ from its `deltas` was
    changed by the caller, and is returned alone."""
    pieces, calls = pieces_of(objects_of(message.get("deltas"))), objects_of(message.get("tool_calls"))
    texts = [piece["content"] for piece in pieces if "content" in piece]
    text: Any = texts[0] if len(texts) == 1 else "".join(map(text_of, texts))
    counts = [len(objects_of(piece.get("tool_calls"))) for piece in pieces]
    if not pieces or text != (message.get("content") or "") or sum(counts) != len(calls):
        return [_without_order(message)]
    rest = iter(calls)  # the message's own calls, whose IDs and arguments are complete
    counted = zip(pieces, counts, strict=True)
    return [{"role": "assistant", **piece, "tool_calls": list(islice(rest, count))} for piece, count in counted]


def without_order(body: dict[str, Any]) -> dict[str, Any]:
    """Return a chat request whose messages have no `deltas`, which only Updraft knows."""
    if not any("deltas" in message for message in objects_of(body.get("messages"))):
        return body
    return {**body, "messages": [_without_order(message) for message in body["messages"]]}


def _without_order(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "deltas"}


class _Texts(list[str]):
    """Texts to join at the end, since adding each to a long text would take quadratic time."""


def _joined(name: str, before: Any, value: Any) -> Any:
    """Join the values of a field; lists grow in place. A call without a type continues the call before it."""
    if isinstance(value, str):
        texts = before if isinstance(before, _Texts) else _Texts()
        texts.append(value)
        return texts
    if not isinstance(value, list):
        return value
    is_list = isinstance(before, list) and not isinstance(before, _Texts)
    joined = cast("list[Any]", before) if is_list else list[Any]()
    for entry in objects_of(value):
        if name == "tool_calls" and joined and "type" not in entry:
            joined[-1] = _continued(joined[-1], object_of(entry.get("function")))
        else:
            joined.append(entry)
    return joined


def _continued(call: dict[str, Any], added: dict[str, Any]) -> dict[str, Any]:
    function = object_of(call.get("function"))
    arguments = function.get("arguments")
    if not isinstance(arguments, _Texts):
        arguments = _Texts([text_of(arguments)])
        call = {**call, "function": {**function, "arguments": arguments}}
    arguments.append(text_of(added.get("arguments")))
    return call


def _whole(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with all `_Texts` joined."""
    for function in (object_of(call.get("function")) for call in objects_of(fields.get("tool_calls"))):
        if isinstance(arguments := function.get("arguments"), _Texts):
            function["arguments"] = "".join(arguments)
    return {name: "".join(value) if isinstance(value, _Texts) else value for name, value in fields.items()}
