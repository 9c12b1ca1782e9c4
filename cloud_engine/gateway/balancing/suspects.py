"""Bounds the harm of failures: a budget for retries, and requests that fail one node after the other."""

from __future__ import annotations

import mmap
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct

from ....protocol.errors import QuarantinedRequestError

_RETRY_SHARE = 0.2
_MAX_RETRIES = 100.0  # saved up, and there at the start
_FAULTS = 2
_QUARANTINE_S = 300.0
_MAX_SUSPECTS = 4096
_RECORD = Struct("=16sd")  # a digest, and since when
_RECORDS = 4096


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


class Quarantine:
    """The requests that are refused, for all processes that are forked from this one: each by its digest.

    Nothing is locked: of two that are written to one place at once, none is found there.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, (1 + _RECORDS) * _RECORD.size)

    @property
    def was_used(self) -> bool:
        return self._memory[0] != 0

    def add(self, digest: bytes, now: float) -> None:
        _RECORD.pack_into(self._memory, self._place(digest), digest, now)
        self._memory[0] = 1

    def since(self, digest: bytes) -> float | None:
        known, since = _RECORD.unpack_from(self._memory, self._place(digest))
        return since if known == digest else None

    def remove(self, digest: bytes) -> None:
        if self.since(digest) is not None:
            _RECORD.pack_into(self._memory, self._place(digest), bytes(len(digest)), 0.0)

    def _place(self, digest: bytes) -> int:
        return (1 + int.from_bytes(digest[:8], "big") % _RECORDS) * _RECORD.size


@dataclass(slots=True)
class _Suspect:
    # When it was last seen to fail a node, by the registry's clock.
    at: float
    # The faults: a node, and which of its trips. Requests that were there by chance have one in common.
    faults: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])


class Suspects:
    """Requests during which nodes failed, by digest: the last few thousand, for some minutes.

    Each worker finds its own: they could not tell whether two of them saw the same failure. All refuse what one found.
    """

    def __init__(self, quarantine: Quarantine | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._quarantine = quarantine or Quarantine()
        self._clock = clock
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()

    def __len__(self) -> int:
        return len(self._suspects)

    def check(self, *parts: bytes) -> None:
        """Raises QuarantinedRequestError for a request that failed several nodes."""
        if not self._quarantine.was_used:
            return  # no digest is computed while nothing fails
        since = self._quarantine.since(_digest(parts))
        if since is not None and (left := since + _QUARANTINE_S - self._clock()) > 0:
            raise QuarantinedRequestError(
                f"{_FAULTS} nodes failed while they had this request: it is refused for {left:.0f} s. "
                "Change it, or report it."
            )

    def failed(self, fault: tuple[str, int], *parts: bytes) -> None:
        """A node failed while it had this request."""
        digest, now = _digest(parts), self._clock()
        suspect = self._suspects.pop(digest, None)
        if suspect is None or suspect.at < now - _QUARANTINE_S:
            suspect = _Suspect(now)
        suspect.at = now
        suspect.faults.add(fault)
        if len(suspect.faults) >= _FAULTS:
            self._quarantine.add(digest, now)
            return
        self._suspects[digest] = suspect
        if len(self._suspects) > _MAX_SUSPECTS:
            self._suspects.popitem(last=False)

    def answered(self, *parts: bytes) -> None:
        """A request went well: it was not the cause."""
        if self._suspects or self._quarantine.was_used:
            digest = _digest(parts)
            self._suspects.pop(digest, None)
            self._quarantine.remove(digest)


def _digest(parts: tuple[bytes, ...]) -> bytes:
    return blake2b(b"\0".join(parts), digest_size=16).digest()
