"""A circuit breaker per cloud: one that is down or hangs costs the next requests nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from .failures import CloudFailure, circuit_open

FAILURES_TO_OPEN = 3
"""Attempts in a row that do not reach the cloud."""

COOL_DOWN_S = 10.0
"""Seconds without a request, from the opening on; twice as long after each probe that fails."""

MAX_COOL_DOWN_S = 60.0


class CircuitBreaker:
    """Closed, every attempt passes. Open, none does. Half-open, when the cool-down is over, one passes as a probe.

    `clock` gives seconds that never go back.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._failures = 0
        self._cause = ""
        self._cool_down_s = COOL_DOWN_S
        self._opens_until: float | None = None  # None: it is closed
        self._probing = False

    @property
    def is_open(self) -> bool:
        return self._opens_until is not None

    @contextmanager
    def attempt(self) -> Generator[None]:
        """The block asks the cloud; how it ends is the breaker's to learn from. Raises CloudFailure if none may."""
        probe = self._admit()
        try:
            yield
        except CloudFailure as failure:
            if failure.is_unreached:
                self._failed(failure, probe=probe)
            else:
                self._close()
            raise
        except BaseException:  # the caller left: that says nothing of the cloud
            if probe:
                self._probing = False
            raise
        self._close()

    def _admit(self) -> bool:
        """Whether this attempt is the probe."""
        if self._opens_until is None:
            return False
        seconds = self._opens_until - self._clock()
        if seconds > 0 or self._probing:
            raise circuit_open(self._url, self._cause, max(1.0, seconds))
        self._probing = True
        return True

    def _failed(self, failure: CloudFailure, *, probe: bool) -> None:
        self._failures += 1
        self._cause = failure.cause
        if probe:
            self._probing = False
            self._cool_down_s = min(2 * self._cool_down_s, MAX_COOL_DOWN_S)
        if probe or (not self.is_open and self._failures >= FAILURES_TO_OPEN):
            self._opens_until = self._clock() + self._cool_down_s

    def _close(self) -> None:
        self._failures, self._cool_down_s = 0, COOL_DOWN_S
        self._opens_until, self._probing = None, False
