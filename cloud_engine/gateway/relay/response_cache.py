"""Opt-in cache of answers to identical requests (`--response-cache`).

Only deterministic answers are cached: embeddings, temperature 0, or a seed if all nodes of the model run Updraft.
Entries are per tenant, so tenants never see each other's answers.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from ..balancing.registry import NodeRegistry
from .call import Call, Header

_LARGEST_SHARE = 8  # answers larger than 1/8 of the cache are not cached
_OF_ONE_REQUEST = {b"traceparent", b"tracestate", b"baggage", b"idempotency-key"}  # ignored in the cache key
_OVERHEAD = 512  # bytes per entry besides the body


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """A cached answer, whole or with all events of a stream, as sent to the client."""

    headers: list[Header]
    body: bytes


class ResponseCache:
    """The LRU cache of one worker. Concurrent identical requests are sent to a node once."""

    def __init__(self, most_bytes: int, registry: NodeRegistry) -> None:
        self._most = most_bytes
        self._registry = registry
        self._size = 0
        self._kept: OrderedDict[bytes, CachedAnswer] = OrderedDict()
        self._asked: dict[bytes, asyncio.Future[CachedAnswer | None]] = {}

    async def answer(self, call: Call, ask: Callable[[Call], Awaitable[None]]) -> None:
        """Send the cached answer, or wait for the identical request in flight, or else call `ask`."""
        key = self._key(call) if self._most else None
        if key is None:
            await ask(call)
        elif (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            await call.repeat(kept.headers, kept.body)
        elif (asked := self._asked.get(key)) is not None:
            kept = await asyncio.shield(asked)
            await (ask(call) if kept is None else call.repeat(kept.headers, kept.body))
        else:
            await self._ask(key, call, ask)

    async def _ask(self, key: bytes, call: Call, ask: Callable[[Call], Awaitable[None]]) -> None:
        asked = self._asked[key] = asyncio.get_running_loop().create_future()
        call.copied, kept = bytearray(), None
        try:
            await ask(call)
            if call.row.status == 200 and call.copied is not None:
                kept = CachedAnswer(call.answer_headers, bytes(call.copied))
                self._store(key, kept)
        finally:
            del self._asked[key]
            asked.set_result(kept)

    def _store(self, key: bytes, kept: CachedAnswer) -> None:
        if len(kept.body) > self._most // _LARGEST_SHARE:
            return
        self._kept[key] = kept
        self._size += len(kept.body) + _OVERHEAD
        while self._size > self._most:
            _, oldest = self._kept.popitem(last=False)
            self._size -= len(oldest.body) + _OVERHEAD

    def _key(self, call: Call) -> bytes | None:
        """Return the cache key, or None if the answer is not deterministic."""
        try:
            fields = msgspec.json.decode(call.body, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):  # nested too deeply, or a number out of range
            return None
        is_greedy = fields.get("temperature") == 0
        is_seeded = isinstance(fields.get("seed"), int) and self._registry.runs_updraft(call.model)
        if not (is_greedy or is_seeded or call.path.startswith(b"/v1/embeddings")):
            return None
        headers = [part for name, value in call.forwarded if name not in _OF_ONE_REQUEST for part in (name, value)]
        parts = call.place.tenant.encode(), call.path, msgspec.json.encode(fields, order="sorted"), *headers
        return blake2b(b"".join(b"%d:%b" % (len(part), part) for part in parts), digest_size=32).digest()
