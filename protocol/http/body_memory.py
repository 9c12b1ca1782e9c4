"""Memory budget for request bodies and whole answers: a total per server process, and a limit per owner."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ..errors import OverloadedError, RateLimitError

#: Key of the body's owner in the request's state. Without an owner, only the total limit applies.
BODY_OWNER = "body_owner"
#: Key of a function in the request's state that reserves memory for more bytes, like `BodyMemory.take`.
HOLD_MORE = "hold_more"

TOTAL_BYTES = 256 * 2**20
OWNER_BYTES = 64 * 2**20  # limit per owner, below the total, so that no owner can use it all
SMALL_BYTES = 2**16
ROOM_BYTES = 32 * 2**20  # part of the total that is reserved for requests of at most `SMALL_BYTES`
_MIB = 2**20


@dataclass(eq=False, slots=True)
class HeldMemory:
    """Bytes held by one request: its body, as soon as Content-Length announces it, and its whole answer."""

    owner: str
    size: int = 0


class BodyMemory:
    """Counter of the bytes that all requests hold, per API key (`owner`).

    At the total limit, a slow request of the owner with the most bytes is aborted.
    """

    def __init__(self, total: int = TOTAL_BYTES, per_owner: int = OWNER_BYTES) -> None:
        self._total = total
        self._per_owner = per_owner
        self._used = 0
        self._by_owner: Counter[str] = Counter()
        self._waiting: dict[HeldMemory, asyncio.Timeout] = {}  # waits for clients, the longest first

    def take(self, held: HeldMemory, size: int) -> None:
        """Reserve more bytes. Raises RateLimitError above the owner's limit, OverloadedError above the total."""
        wanted = self._by_owner[held.owner] + size
        if held.owner and wanted > self._per_owner:
            raise RateLimitError(
                f"The bodies and answers of your requests in flight exceed {self._per_owner / _MIB:g} MiB in total: "
                "read responses before sending more.",
                code="body_memory_exceeded",
            )
        limit = self._total - (ROOM_BYTES if held.size + size > SMALL_BYTES else 0)
        while self._used + size > limit:
            largest = max((each.owner for each in self._waiting), key=self._by_owner.__getitem__, default="")
            if not self._waiting or self._by_owner[largest] <= wanted:
                raise OverloadedError("The bodies and answers in flight fill this server's memory: try again later.")
            slowest = next(each for each in self._waiting if each.owner == largest)
            self._waiting.pop(slowest).reschedule(0)
            self.give_back(slowest)
        self._used += size
        self._by_owner[held.owner] += size
        held.size += size

    def give_back(self, held: HeldMemory) -> None:
        self._used -= held.size
        self._by_owner[held.owner] -= held.size
        held.size = 0
        if not self._by_owner[held.owner]:
            del self._by_owner[held.owner]

    @asynccontextmanager
    async def waiting_for_client(self, held: HeldMemory) -> AsyncGenerator[None]:
        """Mark the block as a wait for the client. `take` may end the block to free memory: it raises TimeoutError."""
        try:
            async with asyncio.timeout(None) as self._waiting[held]:
                yield
            if held not in self._waiting:
                raise TimeoutError
        finally:
            self._waiting.pop(held, None)
