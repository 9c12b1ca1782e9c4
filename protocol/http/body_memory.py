"""Memory budget for request bodies: a total per server process, and a limit per owner."""

from __future__ import annotations

from collections import Counter

from ..errors import OverloadedError, RateLimitError

#: Key of the body's owner in the request's state. Without an owner, only the total limit applies.
BODY_OWNER = "body_owner"

TOTAL_BYTES = 256 * 2**20
OWNER_BYTES = 64 * 2**20  # below the total, so that one owner cannot use it all
_MIB = 2**20


class BodyMemory:
    """Counter of bytes held by request bodies, from the Content-Length header to the end of the request."""

    def __init__(self, total: int = TOTAL_BYTES, per_owner: int = OWNER_BYTES) -> None:
        self._total = total
        self._per_owner = per_owner
        self._used = 0
        self._by_owner: Counter[str] = Counter()

    def take(self, owner: str, size: int) -> None:
        """Reserve bytes. Raises RateLimitError above the owner's limit, OverloadedError above the total."""
        if owner and self._by_owner[owner] + size > self._per_owner:
            raise RateLimitError(
                f"The bodies of your requests in flight exceed {self._per_owner / _MIB:g} MiB in total: "
                "wait for responses before sending more.",
                code="body_memory_exceeded",
            )
        if self._used + size > self._total:
            raise OverloadedError(
                "The bodies of all requests in flight exceed this server's memory limit: try again later."
            )
        self._used += size
        self._by_owner[owner] += size

    def give_back(self, owner: str, size: int) -> None:
        self._used -= size
        self._by_owner[owner] -= size
        if not self._by_owner[owner]:
            del self._by_owner[owner]
