"""Retries of one cloud behind its circuit breaker: a cloud that is down or hangs costs the next requests nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar, runtime_checkable

from ...accounting.breaker import Breaker, BreakerRules
from .failures import CloudFailure, circuit_open, timed_out
from .interfaces import Book

RULES = BreakerRules(failures_to_open=3, recovery=10.0, max_recovery=60.0, window_s=60.0)

HUNG_S = 5.0
"""Seconds without an answer, to any request, after which one timeout opens the circuit."""

TRIAL_WAIT_S = 2.0
"""Seconds that the caller of a trial waits for the cloud. The trial then continues in the background."""

_BACKOFF_S = (0.5, 1.0)  # before the second and the third attempt, where the server names no time
_JITTER = 0.25  # of the backoff, so that many clients do not come back at once

T = TypeVar("T")


@runtime_checkable
class _Closable(Protocol):
    async def aclose(self) -> None: ...


class CloudCalls:
    """Sends requests to one cloud. The breaker counts requests, not attempts.

    A 5xx, a cut connection or a short timeout may be due to the request, so several distinct requests must fail in a
    row. After answers with 5xx the next request is a trial at once: a cloud that answers is not down. One request opens
    the circuit of a cloud that it never reaches, or that has been silent to all for long.
    `patience_s`: seconds until an attempt without an answer times out.
    """

    def __init__(self, url: str, patience_s: float = HUNG_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._breaker = Breaker(RULES, clock)
        self._hung_s = 0.9 * min(HUNG_S, patience_s)  # timers may be early
        self._answered_at = clock()
        self._background: asyncio.Task[None] | None = None  # a trial whose caller does not wait any longer

    @property
    def is_open(self) -> bool:
        return self._breaker.state != "closed"

    async def ask(
        self, attempt: Callable[[], Awaitable[T]], until: float, digest: Callable[[], bytes], book: Book | None = None
    ) -> T:
        """The result of the first of three attempts that succeeds.

        `until`: the end of the caller's patience, on the clock of `time.monotonic`. `digest` identifies the request.
        `book` is called before a retry, if the cloud may charge the last attempt. Raises the CloudFailure of the last
        attempt, or one at once where the circuit is open.
        """
        admission = self._breaker.admit()
        if admission == "refused":
            raise circuit_open(self._url, self._breaker.reason, max(1.0, self._breaker.seconds_left))
        if admission == "trial":
            return await self._wait_for_trial(attempt, digest)
        began, billed, reached = self._clock(), False, False
        for tries, backoff_s in enumerate((*_BACKOFF_S, None), 1):
            tried_at = self._clock()
            try:
                answer = await attempt()
            except CloudFailure as failure:
                never_reached = failure.unbilled and failure.status is None
                is_unbilled, reached = failure.unbilled, reached or not never_reached
                failure.unbilled = is_unbilled and not billed
                if self._is_hung(failure, tried_at):
                    self._breaker.trip(failure.cause)
                if backoff_s is None or self.is_open or not await _waited(failure, backoff_s, until):
                    if not reached and tries > 1 and self._answered_at <= began and not self.is_open:
                        self._breaker.trip(failure.cause)
                    self._learn(failure, None if never_reached else digest)
                    raise
                if not is_unbilled and book is not None:
                    failure.unbilled = not billed
                    if not await book(failure.cause):
                        self._learn(failure, digest)
                        raise
                billed = billed or not (is_unbilled or book)
            else:
                self._succeeded()
                return answer
        raise AssertionError("the last attempt returns or raises")

    async def aclose(self) -> None:
        """End a trial that continues in the background."""
        if self._background is not None:
            self._background.cancel()
            await asyncio.wait((self._background,))

    async def _wait_for_trial(self, attempt: Callable[[], Awaitable[T]], digest: Callable[[], bytes]) -> T:
        trial = asyncio.ensure_future(self._trial(attempt, digest))
        try:
            done, _ = await asyncio.wait((trial,), timeout=TRIAL_WAIT_S)
        except asyncio.CancelledError:
            trial.cancel()
            raise
        if done:
            return trial.result()
        self._background = asyncio.create_task(_dropped(trial))
        raise timed_out(self._url, TRIAL_WAIT_S)

    async def _trial(self, attempt: Callable[[], Awaitable[T]], digest: Callable[[], bytes]) -> T:
        try:
            answer = await attempt()
        except CloudFailure as failure:
            self._learn(failure, None if failure.status is None else digest, trial=True)
            raise
        except BaseException:  # the caller left: that says nothing about the cloud
            self._breaker.leave_trial()
            raise
        self._succeeded()
        return answer

    def _succeeded(self) -> None:
        self._breaker.succeeded()
        self._answered_at = self._clock()

    def _learn(self, failure: CloudFailure, digest: Callable[[], bytes] | None, *, trial: bool = False) -> None:
        """Count a request that failed. While the circuit is open, only trials count."""
        if not failure.is_unreached:
            self._succeeded()
        elif trial or not self.is_open:
            answered = failure.status is not None
            self._breaker.failed(failure.cause, None if digest is None else digest(), answered=answered)

    def _is_hung(self, failure: CloudFailure, began: float) -> bool:
        """Whether nothing was answered to anybody for long."""
        return failure.is_timeout and self._answered_at <= began <= self._clock() - self._hung_s


async def _waited(failure: CloudFailure, backoff_s: float, until: float) -> bool:
    """Wait for the next attempt. False: make no other attempt.

    A wait never exceeds the time until `until`. Without a time from the server it stays below half of that: another
    tier may need the rest.
    """
    if not failure.transient:
        return False
    left_s, wait_s = until - time.monotonic(), failure.retry_after_s
    if wait_s is None:
        wait_s, left_s = backoff_s * (1 + _JITTER * random.random()), left_s / 2
    if wait_s >= left_s:
        return False
    await asyncio.sleep(wait_s)
    return True


async def _dropped(trial: asyncio.Future[T]) -> None:
    """Wait for an answer that nobody wants any more, and close it. It stops when it is cancelled."""
    with suppress(CloudFailure):
        answer = await trial
        if isinstance(answer, _Closable):
            await answer.aclose()
