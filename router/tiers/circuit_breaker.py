"""A circuit breaker per cloud: one that is down or hangs costs the next requests nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar, runtime_checkable

from .failures import CloudFailure, circuit_open, timed_out

FAILURES_TO_OPEN = 3
"""Attempts in a row that do not reach the cloud."""

HUNG_S = 5.0
"""Seconds without an answer, to any request, after which one timeout opens the circuit."""

PROBE_WAIT_S = 2.0
"""Seconds that the caller of a probe waits for it; behind it the probe goes on alone."""

COOL_DOWN_S = 10.0
"""Seconds without a request, from the opening on; twice as long after each probe that fails."""

MAX_COOL_DOWN_S = 60.0


T = TypeVar("T")


@runtime_checkable
class _Closable(Protocol):
    async def aclose(self) -> None: ...


class CircuitBreaker:
    """Closed, every attempt passes. Open, none does. Half-open, when the cool-down is over, one passes as a probe.

    `patience_s`: seconds until an attempt without an answer times out. `clock` gives seconds that never go back.
    """

    def __init__(self, url: str, patience_s: float = HUNG_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._hung_s = 0.9 * min(HUNG_S, patience_s)  # timers may be early
        self._failures = 0
        self._cause = ""
        self._cool_down_s = COOL_DOWN_S
        self._opens_until: float | None = None  # None: it is closed
        self._probing = False
        self._answered_at = clock()
        self._background: asyncio.Task[None] | None = None  # a probe whose caller does not wait any longer

    @property
    def is_open(self) -> bool:
        return self._opens_until is not None

    async def ask(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of `attempt`. Raises its CloudFailure, or one at once if the cloud may not be asked."""
        if not self._admit():
            with self._observed():
                return await attempt()
        probe = asyncio.ensure_future(self._probe(attempt))
        try:
            done, _ = await asyncio.wait((probe,), timeout=PROBE_WAIT_S)
        except asyncio.CancelledError:
            probe.cancel()
            raise
        if done:
            return probe.result()
        self._background = asyncio.create_task(_dropped(probe))
        raise timed_out(self._url, PROBE_WAIT_S)

    async def aclose(self) -> None:
        """End a probe that goes on in the background."""
        if self._background is not None:
            self._background.cancel()
            await asyncio.wait((self._background,))

    async def _probe(self, attempt: Callable[[], Awaitable[T]]) -> T:
        with self._observed(probe=True):
            return await attempt()

    @contextmanager
    def _observed(self, *, probe: bool = False) -> Generator[None]:
        """The block asks the cloud; how it ends is the breaker's to learn from."""
        began = self._clock()
        try:
            yield
        except CloudFailure as failure:
            if failure.is_unreached:
                self._failed(failure, began, probe=probe)
            else:
                self._close()
            raise
        except BaseException:  # the caller left: that says nothing of the cloud
            if probe:
                self._probing = False
            raise
        self._close()

    def _admit(self) -> bool:
        """Whether this attempt is the probe. Raises CloudFailure if there is to be none."""
        if self._opens_until is None:
            return False
        seconds = self._opens_until - self._clock()
        if seconds > 0 or self._probing:
            raise circuit_open(self._url, self._cause, max(1.0, seconds))
        self._probing = True
        return True

    def _failed(self, failure: CloudFailure, began: float, *, probe: bool) -> None:
        self._failures += 1
        self._cause = failure.cause
        if probe:
            self._probing = False
            self._cool_down_s = min(2 * self._cool_down_s, MAX_COOL_DOWN_S)
        hung = failure.is_timeout and self._answered_at <= began <= self._clock() - self._hung_s
        if probe or (not self.is_open and (hung or self._failures >= FAILURES_TO_OPEN)):
            self._opens_until = self._clock() + self._cool_down_s

    def _close(self) -> None:
        self._failures, self._cool_down_s = 0, COOL_DOWN_S
        self._opens_until, self._probing = None, False
        self._answered_at = self._clock()


async def _dropped(probe: asyncio.Future[T]) -> None:
    """Wait for an answer that nobody wants any more, and close it. It stops when it is cancelled."""
    with suppress(CloudFailure):
        answer = await probe
        if isinstance(answer, _Closable):
            await answer.aclose()
