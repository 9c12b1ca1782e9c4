"""Containment of failures: a retry budget, and a quarantine for requests that coincide with several node failures."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

from ....protocol.errors import QuarantinedRequestError

_RETRY_SHARE = 0.2
_MAX_RETRIES = 100.0  # maximum number of unused retries that accumulate; also their number at the start
_FAULTS = 2  # consecutive failures that put a request in quarantine
_MAX_FAILURES = 4  # failures kept for each request
_QUARANTINE_S = 300.0
_TIME = Struct("=d")  # header before the records: time of the last failure of any node
_RECORD = Struct(f"=q{'qd' * _MAX_FAILURES}16s")  # failures in a row; hash and time of each failed node; request digest
_RECORDS = 2**14


class RetryBudget:
    """Limits retries to a share of the requests, so that retries do not multiply the load when all nodes fail."""

    def __init__(self) -> None:
        self._left = _MAX_RETRIES

    def requested(self) -> None:
        self._left = min(_MAX_RETRIES, self._left + _RETRY_SHARE)

    def take(self) -> bool:
        """Spend one retry. Return False if the budget is exhausted."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """The failure of a node while a request was in flight on it."""

    node: str
    # Time when the node got the request, by `time.monotonic()`.
    since: float
    # Whether the node got further with the answer than earlier nodes, so that the request is less likely to blame.
    got_further: bool = False


class Quarantine:
    """The requests that were in flight when nodes failed, by digest; shared with all processes forked from this one.

    Writes are not locked; of two concurrent writes to the same slot, one may be lost.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._memory = mmap.mmap(-1, _TIME.size + _RECORDS * _RECORD.size)

    def check(self, *parts: bytes) -> None:
        """Refuse a request during which several nodes failed, given by its `parts`. Raises QuarantinedRequestError."""
        if self._is_empty:
            return
        faults, failures = self._known(_digest(parts))
        if faults >= _FAULTS:
            raise QuarantinedRequestError(
                f"{len(failures)} nodes failed while serving this request. The request is refused for the next "
                f"{failures[-1][1] + _QUARANTINE_S - self._clock():.0f} s. Change or report it."
            )

    def failed(self, failure: NodeFailure, *parts: bytes) -> None:
        """Record that a node failed during this request. Identical requests that fail with the same node count once."""
        digest, node, now = _digest(parts), hash(failure.node), self._clock()
        faults, failures = self._known(digest)
        if any(node == other and at >= failure.since for other, at in failures):
            return
        failures = [*failures, (node, now)][-_MAX_FAILURES:]
        faults = 1 if failure.got_further and len(failures) < _MAX_FAILURES else faults + 1
        numbers = [number for each in failures for number in each] + [0] * (2 * (_MAX_FAILURES - len(failures)))
        self._clear(digest)  # `pack_into` writes the digest last, so that a kill before that leaves an empty record
        _RECORD.pack_into(self._memory, _place(digest), faults, *numbers, digest)
        _TIME.pack_into(self._memory, 0, now)

    def answered(self, *parts: bytes) -> None:
        """Forget the recorded failures of a request, because it has succeeded."""
        if not self._is_empty and self._known(digest := _digest(parts))[0]:
            self._clear(digest)

    @property
    def _is_empty(self) -> bool:
        """Return whether no node has failed lately, so that requests need not be hashed."""
        return _TIME.unpack_from(self._memory)[0] < self._clock() - _QUARANTINE_S

    def _known(self, digest: bytes) -> tuple[int, list[tuple[int, float]]]:
        """Return a request's number of failures in a row, and the node and time of its latest failures."""
        faults, *numbers, known = _RECORD.unpack_from(self._memory, _place(digest))
        failures = [(node, at) for node, at in zip(numbers[::2], numbers[1::2], strict=True) if at]
        if not failures or known != digest or failures[-1][1] < self._clock() - _QUARANTINE_S:
            return 0, []
        return faults, failures

    def _clear(self, digest: bytes) -> None:
        at = _place(digest)
        self._memory[at : at + _RECORD.size] = bytes(_RECORD.size)


def _place(digest: bytes) -> int:
    return _TIME.size + int.from_bytes(digest[:8], "big") % _RECORDS * _RECORD.size


def _digest(parts: tuple[bytes, ...]) -> bytes:
    return blake2b(b"\0".join(parts), digest_size=16).digest()
