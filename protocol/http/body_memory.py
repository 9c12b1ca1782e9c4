"""The memory budget for request bodies: a total per server process, and a share of the total per owner."""

from __future__ import annotations

from collections import Counter

from ..errors import OverloadedError, RateLimitError

#: In the state of a request: the owner whose share its body counts against. Without one, only the total counts.
BODY_OWNER = "body_owner"

TOTAL_BYTES = 256 * 2**20
OWNER_BYTES = 64 * 2**20  # so that no owner alone exhausts the total
_MIB = 2**20


class BodyMemory:
    """Counts bodies in bytes from the announcement of their length to the end of their request."""

    def __init__(self, total: int = TOTAL_BYTES, per_owner: int = OWNER_BYTES) -> None:
        self._total = total
        self._per_owner = per_owner
        self._used = 0
        self._by_owner: Counter[str] = Counter()

    def take(self, owner: str, size: int) -> None:
        """Reserve bytes. Raises RateLimitError if the owner's share is used up, OverloadedError if the total is."""
        if owner and self._by_owner[owner] + size > self._per_owner:
            raise RateLimitError(
                f"Your requests in flight have bodies of more than {self._per_owner / _MIB:g} MiB together: "
                "wait for answers before you send more.",
                code="body_memory_exceeded",
            )
        if self._used + size > self._total:
            raise OverloadedError(
                "The bodies of the requests in flight take all the memory that this server has for them: try again."
            )
        self._used += size
        self._by_owner[owner] += size

    def give_back(self, owner: str, size: int) -> None:
        self._used -= size
        self._by_owner[owner] -= size
        if not self._by_owner[owner]:
            del self._by_owner[owner]
