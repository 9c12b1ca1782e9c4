"""Bounds the harm of failures: a budget for retries, and requests that fail one node after the other."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

from ....protocol.errors import QuarantinedRequestError

_RETRY_SHARE = 0.2
_MAX_RETRIES = 100.0  # saved up, and there at the start
_FAULTS = 2  # deaths in a row that speak against the request
_MAX_DEATHS = 4  # in all
_QUARANTINE_S = 300.0
_TIME = Struct("=d")  # before the records: when a node failed last
_RECORD = Struct(f"=q{'qd' * _MAX_DEATHS}16s")  # faults; of each death the node, by its hash, and when; the digest
_RECORDS = 2**14


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


@dataclass(frozen=True, slots=True)
class Death:
    """A node failed while it had a request."""

    node: str
    # When it got the request, by `time.monotonic()`.
    since: float
    # Whether it brought more of the answer than those that failed before it, which speaks for the request.
    got_further: bool = False


class Suspects:
    """Requests during which nodes failed, by digest, for all processes that are forked from this one.

    Nothing is locked: of two that are written to one place at once, one may be lost.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._memory = mmap.mmap(-1, _TIME.size + _RECORDS * _RECORD.size)

    def check(self, *parts: bytes) -> None:
        """Raises QuarantinedRequestError for a request that failed several nodes."""
        if self._is_calm:
            return
        faults, deaths = self._known(_digest(parts))
        if faults >= _FAULTS:
            raise QuarantinedRequestError(
                f"{len(deaths)} nodes failed while they had this request: it is refused for "
                f"{deaths[-1][1] + _QUARANTINE_S - self._clock():.0f} s. Change it, or report it."
            )

    def failed(self, death: Death, *parts: bytes) -> None:
        """A node failed while it had this request. Others like it, which it had as well, say the same again."""
        digest, node, now = _digest(parts), hash(death.node), self._clock()
        faults, deaths = self._known(digest)
        if any(node == other and at >= death.since for other, at in deaths):
            return
        deaths = [*deaths, (node, now)][-_MAX_DEATHS:]
        faults = 1 if death.got_further and len(deaths) < _MAX_DEATHS else faults + 1
        numbers = [number for each in deaths for number in each] + [0] * (2 * (_MAX_DEATHS - len(deaths)))
        self._clear(digest)  # a process that is killed in between leaves nothing: the digest is written last
        _RECORD.pack_into(self._memory, _place(digest), faults, *numbers, digest)
        _TIME.pack_into(self._memory, 0, now)

    def answered(self, *parts: bytes) -> None:
        """A request went well: it was not the cause."""
        if not self._is_calm and self._known(digest := _digest(parts))[0]:
            self._clear(digest)

    @property
    def _is_calm(self) -> bool:
        """Whether nothing is suspected: no digest is computed while nothing fails."""
        return _TIME.unpack_from(self._memory)[0] < self._clock() - _QUARANTINE_S

    def _known(self, digest: bytes) -> tuple[int, list[tuple[int, float]]]:
        """The faults and the last deaths of a request."""
        faults, *numbers, known = _RECORD.unpack_from(self._memory, _place(digest))
        deaths = [(node, at) for node, at in zip(numbers[::2], numbers[1::2], strict=True) if at]
        if not deaths or known != digest or deaths[-1][1] < self._clock() - _QUARANTINE_S:
            return 0, []
        return faults, deaths

    def _clear(self, digest: bytes) -> None:
        at = _place(digest)
        self._memory[at : at + _RECORD.size] = bytes(_RECORD.size)


def _place(digest: bytes) -> int:
    return _TIME.size + int.from_bytes(digest[:8], "big") % _RECORDS * _RECORD.size


def _digest(parts: tuple[bytes, ...]) -> bytes:
    return blake2b(b"\0".join(parts), digest_size=16).digest()
