"""Retries of one cloud behind a circuit breaker, so that requests do not wait for a cloud that is down."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from ...accounting.breaker import Breaker, BreakerRules
from ...protocol.http.wire import close_body
from .failures import CloudFailure, circuit_open, timed_out
from .interfaces import Book

RULES = BreakerRules(failures_to_open=3, recovery=10.0, max_recovery=60.0, window_s=60.0)

HUNG_S = 5.0  # shortest timeout that counts as a sign of a hung cloud, in seconds
TRIAL_WAIT_S = 2.0  # seconds that the caller of a trial waits; the trial then continues in the background
_BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each retry, unless the server sends Retry-After; then the last
_SILENCES = 2  # distinct requests that must time out to open the circuit, since a single one may be slow
_JITTER = 0.25  # random share added to the backoff, so that clients do not retry in step

T = TypeVar("T")


class CloudCalls:
    """Sends requests to one cloud with retries. The breaker counts requests, not attempts.

    A 5xx or a broken connection may be the request's fault, so the circuit opens only after three distinct requests in
    a row have failed within a minute. Since the cloud is up, one request at a time is still sent, without retries. If
    the cloud cannot be reached, one request with retries, or three without, open the circuit. So do two requests that
    time out while no other request is answered. A timeout that the caller chose too short does not count.
    `timeout_s`: timeout of an attempt, in seconds.
    """

    def __init__(self, url: str, timeout_s: float = HUNG_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._clock = clock
        self._breaker = Breaker(RULES, clock)
        self._hung_s = 0.9 * min(HUNG_S, timeout_s)  # 0.9, because timers may fire early
        self._answered_at = clock()
        self._silences: set[bytes] = set()  # digests of the requests that timed out since the last answer
        self._background: asyncio.Task[None] | None = None  # a trial request of the breaker that no caller awaits

    @property
    def is_open(self) -> bool:
        return self._breaker.state != "closed"

    async def ask(
        self,
        attempt: Callable[[], Awaitable[T]],
        until: float,
        digest: Callable[[], bytes],
        book: Book | None = None,
        retries: int = 2,
    ) -> T:
        """Return the result of the first successful attempt, of up to `retries` + 1.

        `until`: the caller's deadline, by `time.monotonic()`. `digest`: returns a digest of the request. `book`: called
        before a retry, if the cloud may charge for the failed attempt. Raises the CloudFailure of the last attempt, or
        a CloudFailure at once if the circuit is open.
        """
        admission = self._breaker.admit()
        if admission == "refused":
            raise circuit_open(self._url, self._breaker.reason, max(1.0, self._breaker.seconds_left))
        if admission == "trial":
            return await self._wait_for_trial(attempt, digest)
        began, billed, reached = self._clock(), False, False
        for tries in range(1, retries + 2):
            tried_at, backoff_s = self._clock(), _BACKOFF_S[min(tries, len(_BACKOFF_S)) - 1]
            try:
                answer = await attempt()
            except CloudFailure as failure:
                never_reached = failure.unbilled and failure.status is None
                is_unbilled, reached = failure.unbilled, reached or not never_reached
                failure.unbilled = is_unbilled and not billed
                if self._is_silent(failure, tried_at):
                    self._silences.add(digest())
                    if len(self._silences) >= _SILENCES:
                        self._breaker.trip(failure.cause)
                if tries > retries or self.is_open or not await _waited(failure, backoff_s, until):
                    if not reached and tries > 1 and self._answered_at <= began and not self.is_open:
                        self._breaker.trip(failure.cause)
                    if not (failure.is_timeout and self._clock() - tried_at < self._hung_s):
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
        """Cancel a trial that continues in the background."""
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
            never_reached = failure.unbilled and failure.status is None
            self._learn(failure, None if never_reached or failure.is_timeout else digest, trial=True)
            raise
        except BaseException:  # a cancelled trial says nothing about the cloud
            self._breaker.leave_trial()
            raise
        self._succeeded()
        return answer

    def _succeeded(self) -> None:
        self._breaker.succeeded()
        self._silences.clear()
        self._answered_at = self._clock()

    def _learn(self, failure: CloudFailure, digest: Callable[[], bytes] | None, *, trial: bool = False) -> None:
        """Report a failed request to the breaker. While the circuit is open, only trials count."""
        if not failure.is_unreached:
            self._succeeded()
        elif trial or not self.is_open:
            answered = digest is not None and not failure.is_timeout
            self._breaker.failed(failure.cause, None if digest is None else digest(), answered=answered)

    def _is_silent(self, failure: CloudFailure, began: float) -> bool:
        """Return whether the failure is a long timeout during which the cloud answered no request at all."""
        return failure.is_timeout and self._answered_at <= began <= self._clock() - self._hung_s


async def _waited(failure: CloudFailure, backoff_s: float, until: float) -> bool:
    """Wait before the next attempt. Return False, without waiting, if there should be no further attempt. The wait must
    end before `until`. Without Retry-After, the wait must also be shorter than half of the time left, since another
    tier may need time."""
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
    """Wait for the answer of a trial whose caller no longer waits, and close it."""
    with suppress(CloudFailure):
        await close_body(await trial)
