"""Assembly of a chat completion from streamed chunks, and helpers for reading chunks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jiter
import msgspec

from ..http.lenient_json import json_bytes, object_of, objects_of, raw_object
from .opaque_state import add_details

#: Fields whose texts or lists are concatenated across chunks. For other fields the last value counts.
_TEXTS = ("content", "refusal", "reasoning_content", "reasoning", "arguments", "input")
_LISTS = ("thinking_blocks", "annotations", "citations")  # each chunk adds complete entries
#: Anthropic's stop reason of an unfinished answer, and the `stop_reason` of its chat choice.
PAUSED = "pause_turn"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


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
                self.fields[name] = value

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
    stop_reason: Any = None


class ChatChunks:
    """Accumulator for the chunks of one stream; `whole` returns the assembled completion."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}

    def read(self, chunk: dict[str, Any]) -> None:
        self._fields |= {name: value for name, value in chunk.items() if name != "choices" and value is not None}
        for number, choice in enumerate(objects_of(chunk.get("choices"))):
            merged = self._choices.setdefault(index_of(choice, number), _Choice())
            merged.message.add(object_of(choice.get("delta")))
            merged.logprobs += objects_of(object_of(choice.get("logprobs")).get("content"))
            merged.finish_reason = choice.get("finish_reason") or merged.finish_reason
            merged.stop_reason = choice.get("stop_reason") or merged.stop_reason

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": choice.message.whole(),
                "logprobs": {"content": choice.logprobs, "refusal": None} if choice.logprobs else None,
                "finish_reason": choice.finish_reason,
                **({} if choice.stop_reason is None else {"stop_reason": choice.stop_reason}),
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
    if (whole := raw_object(text)) is not None:
        has_constants = re.search("NaN|Infinity", _STRING.sub("", text)) is not None
        return whole, [f"{named} hold NaN or Infinity, which JSON lacks: null"] if has_constants else []
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
    return f"event: {event['type']}\ndata: ".encode() + json_bytes(event) + b"\n\n"


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
