"""Cache of answers to exactly repeated requests with temperature 0 or a seed, which should get the same answer."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ...protocol.dialects.chat_chunks import ChatChunks, deltas_of
from ...protocol.http import sse
from ...protocol.http.forwarding import forwarded
from ...protocol.http.lenient_json import json_bytes, json_of, object_of, table, tables
from ...protocol.http.wire import WireRequest
from ...protocol.safety.bounded_cache import BoundedCache
from ..accounting.request_record import RequestRecord
from ..request.chat_request import Caller

_OVERHEAD = 512  # bytes of Python objects per entry


@dataclass(frozen=True, slots=True)
class CachedCompletion:
    """A completion as JSON without the `updraft` object."""

    completion: bytes
    tier: Literal["local", "cloud"]
    # Time of the answer, by `time.monotonic()`.
    at: float
    # The record's `answer_notes` and `native_fields`.
    notes: tuple[str, ...] = ()
    native_fields: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return len(self.completion) + sum(map(len, self.notes)) + _OVERHEAD


class AnswerCache(BoundedCache[bytes, CachedCompletion]):
    """Cache of at most `max_bytes` of answers, each kept for `ttl_s` seconds."""

    def __init__(self, max_bytes: int, ttl_s: float) -> None:
        super().__init__(sys.maxsize, max_bytes, lambda _, entry: entry.size)
        self._ttl_s = ttl_s

    def get(self, key: bytes) -> CachedCompletion | None:
        entry = super().get(key)
        if entry is not None and time.monotonic() - entry.at > self._ttl_s:
            self.drop(key)
            return None
        return entry


class CacheSlot:
    """The place in the answer cache for one request, by the request's key."""

    def __init__(self, cache: AnswerCache, key: bytes) -> None:
        self._cache = cache
        self._key = key

    @classmethod
    def of(
        cls, cache: AnswerCache | None, caller: Caller, request: WireRequest, body: dict[str, Any]
    ) -> CacheSlot | None:
        """Return the slot, or None if the answer may vary because the request has neither temperature 0 nor a seed.

        The key covers everything that the answer and its notes depend on: API key, query, headers that a cloud may
        read, the caller's names of fields, and the request without stream options. The order of the fields does not
        matter, except within a value: clouds follow the order of a schema's properties.
        """
        if cache is None or not (body.get("temperature") == 0 or isinstance(body.get("seed"), int)):
            return None
        fields: list[Mapping[str, Any]] = [forwarded(request.headers).answer_headers, request.names, _lasting(body)]
        if request.native is not None:
            fields += [_lasting(request.native.fields), request.native.headers]
        parts = [caller.key, request.query, request.mark.is_private, *(sorted(each.items()) for each in fields)]
        text = msgspec.json.encode(parts)
        return cls(cache, hashlib.sha256(text).digest())

    def get(self) -> CachedCompletion | None:
        return self._cache.get(self._key)

    def keep(self, completion: dict[str, Any], record: RequestRecord) -> None:
        """Cache an answer if it can be repeated, also as a stream. Answers that depend on time (a failure, a spent
        budget, an answer cut by a budget, a continuation in the cloud) or chance (exploration) are not cached."""
        by_chance = record.time_dependent or any(
            decision.exploration_chance for decision in (record.decision, *record.decisions)
        )
        lasting = record.route in ("local", "cloud", "escalated") and not record.note and not by_chance
        is_cut = bool(record.budget_note) and any(
            choice.get("finish_reason") == "length" for choice in tables(completion.get("choices")) or ()
        )
        if lasting and not is_cut and _is_plain(completion):
            bare = json_bytes({name: value for name, value in completion.items() if name != "updraft"})
            notes = tuple(record.answer_notes), tuple(record.native_fields)
            self._cache.put(self._key, CachedCompletion(bare, record.tier, time.monotonic(), *notes))

    async def keep_stream(self, events: AsyncGenerator[bytes], record: RequestRecord) -> AsyncGenerator[bytes]:
        """Yield `events` unchanged, and cache their completion if they end properly."""
        raw: list[bytes] = []
        async with aclosing(events):
            async for event in events:
                raw.append(event)
                if event.endswith(sse.DONE) and (completion := joined(raw)) is not None:
                    completion.setdefault("usage", msgspec.to_builtins(record.usage()))
                    self.keep(completion, record)
                yield event


def answer_of(entry: CachedCompletion, record: RequestRecord) -> dict[str, Any]:
    """Return the cached completion with the ID of the new request, and note the cache hit in the request's `record`."""
    completion: dict[str, Any] = json_of(entry.completion, exact=True)
    record.repeat(entry.tier, object_of(completion.get("usage")), time.monotonic() - entry.at)
    record.notes, record.native_fields = entry.notes, list(entry.native_fields)
    return {**completion, "id": record.request_id, "updraft": record.info()}


def _lasting(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that decide the answer."""
    return {name: value for name, value in fields.items() if name not in ("stream", "stream_options")}


async def stream_of(completion: dict[str, Any], *, include_usage: bool) -> AsyncGenerator[bytes]:
    """Yield a completion as a stream: the deltas of each choice, then the finish reasons with the `updraft` object."""
    last = ("choices", "usage", "updraft", "sampling")
    base = {name: value for name, value in completion.items() if name not in last}
    base["object"] = "chat.completion.chunk"
    choices = tables(completion.get("choices")) or []
    for choice in choices:
        logprobs = choice.get("logprobs")
        for said in deltas_of(choice):
            delta = {name: value for name, value in said.items() if value is not None}
            for index, call in enumerate(tables(delta.get("tool_calls")) or []):
                call.setdefault("index", index)
            piece = {"index": choice["index"], "delta": delta, "finish_reason": None, "logprobs": logprobs}
            yield sse.event({**base, "choices": [piece]})
    nothing: dict[str, Any] = {}
    reasons = ("index", "finish_reason", "stop_reason")
    ends = [{name: each[name] for name in reasons if name in each} | {"delta": nothing} for each in choices]
    extensions = {name: completion[name] for name in ("sampling", "updraft") if name in completion}
    yield sse.event({**base, "choices": ends, **extensions})
    if include_usage:
        yield sse.event({**base, "choices": [], "usage": completion.get("usage")})
    yield sse.DONE


def joined(events: list[bytes], *, only_text: bool = True) -> dict[str, Any] | None:
    """Return the completion that a stream's events form; None if an event is malformed, or has more than text."""
    parser, chunks = sse.EventParser(), ChatChunks()
    try:
        for payload in (payload for event in events for payload in parser.feed(event)):
            chunk = table(json_of(payload, exact=True))
            if chunk is None or (only_text and not _is_text(chunk)):
                return None
            chunks.read(chunk)
    except ValueError:
        return None
    whole = chunks.whole()
    return whole if whole["choices"] and all(choice["finish_reason"] for choice in whole["choices"]) else None


def _is_text(chunk: dict[str, Any]) -> bool:
    """Return whether all choices of a chunk have an index and no content but text."""
    pieces = tables(chunk.get("choices"))
    return pieces is not None and all(
        isinstance(piece.get("index"), int)
        and isinstance((delta := object_of(piece.get("delta"))).get("content"), str | None)
        and isinstance(piece.get("finish_reason"), str | None)
        and not any(value is not None for name, value in delta.items() if name not in ("role", "content"))
        for piece in pieces
    )


def _is_plain(completion: dict[str, Any]) -> bool:
    """Return whether `stream_of` can stream all choices."""
    choices = tables(completion.get("choices"))
    return bool(choices) and all(
        isinstance(choice.get("index"), int)
        and isinstance((table(choice.get("message")) or {"content": 0}).get("content"), str | None)
        and isinstance(choice.get("finish_reason"), str)
        for choice in choices
    )
