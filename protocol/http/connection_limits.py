"""Connection limits, in total and per address, so that a server does not run out of file descriptors."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from ..safety.system import raise_descriptor_limit
from .access import is_loopback

_MOST = 10_000
_RESERVED = 128  # descriptors for files, databases and libraries


class LimitedConnection(Protocol):
    def close_now(self) -> None: ...


class ConnectionLimits:
    """Registry of open connections. At a limit, the connection that has been idle longest is closed."""

    def __init__(self, total: int, per_address: int) -> None:
        self._total = total
        self._per_address = per_address
        self._addresses: dict[LimitedConnection, str] = {}
        self._counts: Counter[str] = Counter()
        self._resting: dict[str, dict[LimitedConnection, None]] = {}
        self._all_resting: dict[LimitedConnection, None] = {}

    def admit(self, connection: LimitedConnection, address: str) -> bool:
        """Register a new, idle connection. Returns False if a limit is reached and no connection is idle."""
        # A reverse proxy on this machine may need many connections, so loopback has no limit per address.
        if self._counts[address] >= self._per_address and not is_loopback(address):
            self._close_oldest(self._resting.get(address, {}))
            if self._counts[address] >= self._per_address:
                return False
        if len(self._addresses) >= self._total:
            self._close_oldest(self._all_resting)
            if len(self._addresses) >= self._total:
                return False
        self._addresses[connection] = address
        self._counts[address] += 1
        self.mark_idle(connection)
        return True

    def mark_busy(self, connection: LimitedConnection) -> None:
        self._all_resting.pop(connection, None)
        if (address := self._addresses.get(connection)) is not None and address in self._resting:
            self._resting[address].pop(connection, None)
            if not self._resting[address]:
                del self._resting[address]

    def mark_idle(self, connection: LimitedConnection) -> None:
        """Mark a connection as idle, which means that it waits for a request or for the rest of a request."""
        if (address := self._addresses.get(connection)) is not None:
            self._all_resting[connection] = None
            self._resting.setdefault(address, {})[connection] = None

    def forget(self, connection: LimitedConnection) -> None:
        self.mark_busy(connection)
        if (address := self._addresses.pop(connection, None)) is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def _close_oldest(self, resting: dict[LimitedConnection, None]) -> None:
        if resting:
            oldest = next(iter(resting))
            self.forget(oldest)
            oldest.close_now()


def usual_limits() -> ConnectionLimits:
    """Raise the limit of file descriptors. Return connection limits that leave half of them to outgoing connections."""
    total = min(_MOST, (raise_descriptor_limit(2 * _MOST + _RESERVED) - _RESERVED) // 2)
    return ConnectionLimits(max(total, 8), max(total // 2, 4))
