"""Builders of chat completions and chunks from other APIs' answers."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from ....accounting.reported_usage import counted
from ....protocol.dialects.chat_chunks import ChatChunks
from ....protocol.dialects.pieces import order_of
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


def completion_of(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole completion. A message with a different order than its fields also has `deltas`."""
    whole, deltas = ChatChunks(), defaultdict[int, list[dict[str, Any]]](list)
    for chunk in chunks:
        whole.read(chunk)
        for choice in chunk["choices"]:
            deltas[choice["index"]].append(choice["delta"])
    completion = whole.whole()
    for choice in completion["choices"]:
        choice["message"] |= order_of(deltas[choice["index"]])
    return completion


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
        self._lengths = Counter[tuple[int, str]]()  # lengths of the messages' lists, by choice and field

    def entries(self, field: str, added: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
        """Return entries to append to a message's list, each with its index, by which clients join deltas."""
        first = self._lengths[index, field]
        self._lengths[index, field] += len(added)
        return [{"index": place, **entry} for place, entry in enumerate(added, first)]

    def delta(self, delta: dict[str, Any], finish: str | None = None, index: int = 0) -> dict[str, Any]:
        return self._chunk([{"index": index, "delta": delta, "finish_reason": finish}])

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._chunk([]), "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        about = {"id": self.id, "object": "chat.completion.chunk", "created": self._created, "model": self.model}
        return {**about, "choices": choices}
