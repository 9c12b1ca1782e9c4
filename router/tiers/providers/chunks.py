"""Builders of chat completions and chunks from other APIs' answers."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ....accounting.reported_usage import counted
from ....protocol.http.lenient_json import json_bytes


def whole(value: Any) -> int:
    """Return a count or index, or 0 for an invalid value."""
    return counted(value) or 0


def arguments_of(value: Any) -> str:
    """Return a tool call's arguments as JSON text; raw JSON stays unchanged."""
    text = bytes(value) if isinstance(value, msgspec.Raw) else json_bytes(value)
    return "{}" if text == b"null" else text.decode()


def tool_call(identifier: str, name: str, arguments: str, **more: Any) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def message(texts: list[str], reasoning: list[str], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an assistant message with text, reasoning and tool calls."""
    fields: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if reasoning:
        fields["reasoning_content"] = "".join(reasoning)
    if calls:
        fields["tool_calls"] = calls
    return fields


def completion(identifier: Any, model: Any, choices: list[dict[str, Any]], usage: Any) -> dict[str, Any]:
    about = {"id": str(identifier), "object": "chat.completion", "created": int(time.time()), "model": str(model)}
    return {**about, "choices": choices, "usage": usage}


def usage_of(read: int, written: int, cached: int, stored: int = 0, **more: Any) -> dict[str, Any]:
    """Return OpenAI's usage object. `cached` and `stored`: tokens read from and written to the cache."""
    counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    details = {"cached_tokens": cached, **({"cache_write_tokens": stored} if stored else {})}
    return {**counts, "prompt_tokens_details": details, **more}


class ChunkMaker:
    """Builder of the chunks of one stream, which share ID, model and time."""

    def __init__(self) -> None:
        self.id = ""
        self.model = ""
        self._created = int(time.time())

    def delta(self, delta: dict[str, Any], finish: str | None = None, index: int = 0) -> dict[str, Any]:
        return self._chunk([{"index": index, "delta": delta, "finish_reason": finish}])

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        about = {"id": self.id, "object": "chat.completion.chunk", "created": self._created, "model": self.model}
        return {**about, "choices": choices}
