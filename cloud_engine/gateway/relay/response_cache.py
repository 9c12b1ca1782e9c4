"""Opt-in cache of answers to identical requests (`--response-cache`).

Only deterministic answers are cached: embeddings, temperature 0, or a seed if all nodes of the model run Updraft. A
request that reads or changes stored state, or whose tools a provider runs, is never cached.
Entries are per tenant, so tenants never see each other's answers.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any

import msgspec

from ....accounting.token_estimate import NESTED
from ....protocol.decoding import UNREADABLE
from ....protocol.dialects.messages_request import MessagesRequest
from ....protocol.dialects.responses_request import ResponsesRequest
from ....protocol.embeddings import EmbeddingRequest
from ....protocol.http import sse
from ....protocol.http.lenient_json import object_of, objects_of
from ....protocol.requests import ChatRequest, CompletionRequest
from ..access.principal import PRIORITIES, Priority
from ..balancing.registry import NodeRegistry
from ..limits.request_size import SizeFields
from .answer_checks import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from .call import MAX_COPIED, Call, Header

_LARGEST_SHARE = 8  # answers larger than 1/8 of the cache are not cached
_OF_ONE_REQUEST = {b"traceparent", b"tracestate", b"baggage"}  # headers that the cache key ignores
_OVERHEAD = 512  # bytes counted per entry in addition to the body
_FINISHED = frozenset(
    ("stop", "length", "tool_calls", "function_call", "content_filter",
     "completed", "end_turn", "max_tokens", "stop_sequence", "tool_use")
)  # fmt: skip
_STATEFUL = {"background", "background_options", "context_management", "conversation", "previous_response_id"}
# Fields of cacheable requests. Any other field may refer to state, such as `container`, or to a search on the web.
_CACHEABLE = {
    name
    for request in (ChatRequest, CompletionRequest, EmbeddingRequest, ResponsesRequest, MessagesRequest, SizeFields)
    for name in request.__struct_fields__
} - _STATEFUL.union(NESTED)
_OWN_TOOLS = ("function", "custom")  # types of tools that the client runs
# Finish reason in other APIs: name of the object that holds it in a stream's events, and name of its field.
_REASONS = {RESPONSES: ("response", "status"), MESSAGES: ("delta", "stop_reason")}
_Kept = tuple[list[Header], bytes]  # headers, and the body or all events of a stream


class ResponseCache:
    """The LRU cache of one worker. Concurrent identical requests are sent to a node once, except for streams."""

    def __init__(self, most_bytes: int, registry: NodeRegistry) -> None:
        self._most = most_bytes
        self._registry = registry
        self._size = 0
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._asked: dict[tuple[bytes, Priority], asyncio.Future[_Kept | None]] = {}

    async def answer(self, call: Call, ask: Callable[[Call], Awaitable[None]]) -> None:
        """Send the cached answer, or wait for the identical request in flight, or else call `ask`.

        The wait ends when the node has answered, because a client may read its answer slowly or never. No request waits
        for a request of lower priority, which may be queued for long.
        """
        key = self._key(call) if self._most else None
        if key is None:
            await ask(call)
        elif (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            await call.repeat(*kept)
        elif not call.stream and (asked := self._in_flight(key, call.place.priority)) is not None:
            kept = await asyncio.shield(asked)
            await (ask(call) if kept is None else call.repeat(*kept))
        else:
            await self._ask(key, call, ask)

    def _in_flight(self, key: bytes, priority: Priority) -> asyncio.Future[_Kept | None] | None:
        """Return the answer of an identical request in flight, if that request has this priority or a higher one."""
        higher = PRIORITIES[: PRIORITIES.index(priority) + 1]
        return next((asked for each in higher if (asked := self._asked.get((key, each))) is not None), None)

    async def _ask(self, key: bytes, call: Call, ask: Callable[[Call], Awaitable[None]]) -> None:
        asked = asyncio.Future[_Kept | None]()
        place: tuple[bytes, Priority] = key, call.place.priority
        self._asked |= {} if call.stream else {place: asked}

        def starts(body: bytes | None) -> None:
            if not asked.done():
                asked.set_result(None if body is None or call.copied is None else self._store(key, call, body))
                if not call.stream:
                    del self._asked[place]
            call.copied = call.copied if body is None else None

        call.starts, call.copied = starts, bytearray()
        try:
            await ask(call)
            if call.copied is not None:
                self._store(key, call, bytes(call.copied))
        finally:
            starts(None)

    def _store(self, key: bytes, call: Call, body: bytes) -> _Kept | None:
        """Cache an answer if it is small enough. Return None if identical requests must not get this answer."""
        if call.row.status != 200 or len(body) > MAX_COPIED or not _is_finished(call, body):
            return None
        kept = call.answer_headers, body
        if len(body) > self._most // _LARGEST_SHARE or key in self._kept:
            return kept
        self._kept[key] = kept
        self._size += len(body) + _OVERHEAD
        while self._size > self._most:
            _, (_, oldest) = self._kept.popitem(last=False)
            self._size -= len(oldest) + _OVERHEAD
        return kept

    def _key(self, call: Call) -> bytes | None:
        """Return the cache key, or None if the answer is not deterministic."""
        try:
            fields = msgspec.json.decode(call.body, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):  # deeply nested JSON, or a number out of range
            return None
        is_greedy = fields.get("temperature") == 0
        is_seeded = isinstance(fields.get("seed"), int) and self._registry.runs_updraft(call.model)
        if not (is_greedy or is_seeded or call.path.startswith(b"/v1/embeddings")) or _has_state(_route(call), fields):
            return None
        headers = [part for name, value in call.forwarded if name not in _OF_ONE_REQUEST for part in (name, value)]
        parts = call.place.tenant.encode(), call.path, call.body, *headers
        return blake2b(b"".join(b"%d:%b" % (len(part), part) for part in parts), digest_size=32).digest()


def _route(call: Call) -> str:
    return call.path.partition(b"?")[0].decode()


def _has_state(route: str, fields: dict[str, Any]) -> bool:
    """Return whether an answer is stored, or may depend on stored state or a provider's tools."""
    is_stored = fields.get("store") is not False and (route == RESPONSES or fields.get("store") is not None)
    tools = objects_of(fields.get("tools"))
    return (
        is_stored
        or not fields.keys() <= _CACHEABLE
        or isinstance(fields.get("prompt"), dict)  # a template that the provider stores
        or any(tool.get("type", "custom") not in _OWN_TOOLS for tool in tools)
    )


def _is_finished(call: Call, body: bytes) -> bool:
    """Return whether each choice of an answer has ended normally, not because of a failure."""
    if (route := _route(call)) not in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        return True
    reasons: dict[str, str] = {}
    try:
        for payload in sse.EventParser().feed(body) if call.stream else (body,):
            part = msgspec.json.decode(payload, type=dict[str, Any])
            choices = objects_of(part.get("choices"))
            if route in _REASONS:
                holder, name = _REASONS[route]
                choices = [{"finish_reason": (object_of(part.get(holder)) or part).get(name)}]
            for number, choice in enumerate(choices):
                index = str(choice.get("index", number) if call.stream else number)
                reasons[index] = str(choice.get("finish_reason") or reasons.get(index, ""))
    except (*UNREADABLE, sse.EventTooLongError):
        return False
    return bool(reasons) and _FINISHED.issuperset(reasons.values())
