"""Bounds the harm of failures: a budget for retries, and requests that fail one node after the other."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from ....protocol.errors import QuarantinedRequestError

_RETRY_SHARE = 0.2
_MAX_RETRIES = 100.0  # saved up, and there at the start
_FAULTS = 2
_QUARANTINE_S = 300.0
_MAX_SUSPECTS = 4096


class RetryBudget:
    """Retries are a share of the requests: where every node fails, asking others only adds to it."""

    def __init__(self) -> None:
        self._left = _MAX_RETRIES

    def requested(self) -> None:
        self._left = min(_MAX_RETRIES, self._left + _RETRY_SHARE)

    def take(self) -> bool:
        """False: there is nothing left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(slots=True)
class _Suspect:
    # When it was last seen to fail a node, by the registry's clock.
    at: float
    # The faults: a node, and which of its trips. Requests that were there by chance have one in common.
    faults: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])


class Suspects:
    """Requests during which nodes failed, by digest: the last few thousand, for some minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()

    def __len__(self) -> int:
        return len(self._suspects)

    def check(self, *parts: bytes) -> None:
        """Raises QuarantinedRequestError for a request that failed several nodes."""
        if not self._suspects:
            return  # no digest is computed while nothing fails
        digest = _digest(parts)
        suspect = self._suspects.get(digest)
        if suspect is None:
            return
        left = suspect.at + _QUARANTINE_S - self._clock()
        if left <= 0:
            del self._suspects[digest]
        elif len(suspect.faults) >= _FAULTS:
            raise QuarantinedRequestError(
                f"{len(suspect.faults)} nodes failed while they had this request: it is refused for {left:.0f} s. "
                "Change it, or report it."
            )

    def failed(self, fault: tuple[str, int], *parts: bytes) -> None:
        """A node failed while it had this request."""
        digest = _digest(parts)
        suspect = self._suspects.setdefault(digest, _Suspect(0.0))
        suspect.at = self._clock()
        if len(suspect.faults) < _FAULTS:
            suspect.faults.add(fault)
        self._suspects.move_to_end(digest)
        if len(self._suspects) > _MAX_SUSPECTS:
            self._suspects.popitem(last=False)

    def answered(self, *parts: bytes) -> None:
        """A request went well: it was not the cause."""
        if self._suspects:
            self._suspects.pop(_digest(parts), None)


def _digest(parts: tuple[bytes, ...]) -> bytes:
    return blake2b(b"\0".join(parts), digest_size=16).digest()
