"""Failures of a cloud: their kinds, the errors that callers get, and retries behind a circuit breaker."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeVar

import httpx

from ...accounting.breaker import Breaker, BreakerRules
from ...protocol.errors import CloudUnreachableError, RequestTimeoutError, UpdraftError, UpstreamError
from ...protocol.http.lenient_json import completed, error_in, table
from ...protocol.http.wire import close_body
from ...protocol.safety.redaction import shown_url
from .interfaces import Book, Fallback

#: Why the cloud gave no answer: it refused the request or the settings; it was unreachable, slow, busy or broken; its
#: answer was invalid; or the router did not ask it.
FailureKind = Literal["refused", "unreachable", "invalid_answer", "not_asked"]

_TRANSIENT = frozenset({408, 409, 425, 429})  # statuses to retry, in addition to all 5xx
_SPENT = frozenset({"insufficient_quota", "billing_hard_limit_reached", "billing_not_active", "budget_exceeded"})
_MAX_URL = 300  # characters
RULES = BreakerRules(failures_to_open=3, recovery=10.0, max_recovery=60.0, window_s=60.0)
HUNG_S = 5.0  # shortest timeout that counts as a sign of a hung cloud, in seconds
TRIAL_WAIT_S = 2.0  # seconds that the caller of a trial waits; the trial then continues in the background
_BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each retry, unless the server sends Retry-After; then the last
_SILENCES = 2  # distinct requests that must time out to open the circuit, since a single one may be slow
_JITTER = 0.25  # random share added to the backoff, so that clients do not retry in step
T = TypeVar("T")


class RelayedError(UpstreamError):
    """A cloud's own error, relayed with its HTTP status, its OpenAI-shaped `error` and its Retry-After. The client
    should not retry, since the router has already retried if that could help."""

    retryable = False

    def __init__(self, status: int, error: dict[str, Any], retry_after: str | None = None) -> None:
        super().__init__(str(error["message"]), param=error.get("param"), code=error.get("code"))
        self.status = status
        self.type = str(error["type"])
        self.code = error.get("code")
        self._error = error
        self._retry_after = retry_after

    def to_body(self) -> dict[str, Any]:
        return {"error": {**self._error, "message": self.message, "param": self.param}}

    def headers(self) -> dict[str, str]:
        after = {} if self._retry_after is None else {"retry-after": self._retry_after}
        return {**super().headers(), **after}


class CloudFailure(Exception):
    """Failure of a cloud to give a usable answer. The caller gets `error` if no local answer can be used instead."""

    def __init__(
        self, cause: str, error: UpdraftError, kind: FailureKind, *, status: int | None = None, reached: bool = True
    ) -> None:
        super().__init__(cause)
        # Short cause, to show in the reason of a routing decision.
        self.cause = cause
        self.error = error
        self.kind: FailureKind = kind
        # HTTP status of the answer, if the cloud answered.
        self.status = status
        # True if the request cannot have been billed: the server refused it or was never reached.
        self.unbilled = status is not None or not reached
        # True if a retry may succeed.
        self.transient = kind == "unreachable"
        # Delay in seconds that the server asked for before a retry.
        self.retry_after_s: float | None = None
        # Base URL of the cloud.
        self.url = ""

    @property
    def phrase(self) -> str:
        if self.kind == "not_asked":
            return self.cause
        return f"the cloud failed: {self.cause}" + (f" ({self.url})" if self.url else "")

    @property
    def is_timeout(self) -> bool:
        return isinstance(self.error, RequestTimeoutError)

    @property
    def is_unreached(self) -> bool:
        """Return whether the failure suggests that the endpoint is down; a rate limit does not."""
        return self.kind == "unreachable" and self.status != 429

    @property
    def is_model_not_found(self) -> bool:
        return self.error.code == "model_not_found" or (self.status == 404 and "model" in self.error.message.lower())

    def add(self, sentence: str) -> None:
        """Append a sentence to the caller's error message."""
        self.error.message = f"{self.error.message} {sentence}"

    def allows(self, fallback: Fallback) -> bool:
        """Return whether a local answer may replace the cloud's. Always true if the cloud was not asked."""
        if self.kind == "not_asked" or fallback == "any":
            return True
        return fallback == "unreachable" and self.kind != "refused"

    def names(self, field: str) -> bool:
        """Return whether the cloud seems to have refused the request because of its field `field`."""
        return self.status in (400, 422) and field in f"{self.error.message} {self.error.param}"


class CloudForbidden(CloudFailure):
    """Failure of a cloud call that was not made, because the budget is spent or no cloud accepts such a request."""

    def __init__(self, error: UpdraftError, cause: str | None = None) -> None:
        super().__init__(error.message if cause is None else cause, error, "not_asked", reached=False)


def refused(url: str, status: int, headers: Mapping[str, str], raw: bytes) -> CloudFailure:
    """Map an HTTP status other than 200 to a failure."""
    if 200 <= status < 300:
        return invalid_answer(url, f"the server answered {status} instead of 200")
    if 300 <= status < 400:
        return _redirected(url, status, headers.get("location", ""))
    if status >= 600:
        status = 502  # HTTP has no status above 599
    body = error_in(raw, status, f"The cloud at {url} answered {status}")
    after = headers.get("retry-after") or None
    known = after is not None and after.isascii() and after.isprintable() and len(after) <= 64
    error = RelayedError(status, body, after if known else None)
    failure = _relayed(f"the server answered {status}", status, error, headers.get("x-should-retry"))
    failure.status, failure.unbilled = status, True
    failure.retry_after_s = _retry_after_s(headers)
    return failure


def reported(url: str, error: Any) -> CloudFailure:
    """Map an error inside a stream that began with status 200 to a failure."""
    body = completed(table(error) or {"message": error}, 502, f"The cloud at {url} reported an error in its stream.")
    code: Any = body["code"]
    status = code if isinstance(code, int) and 400 <= code < 600 else 502
    return _relayed("the stream reported an error", status, RelayedError(status, body), None)


def timed_out(url: str, seconds: float, *, reached: bool = True) -> CloudFailure:
    error = RequestTimeoutError(f"The cloud at {url} did not answer within {seconds:.1f} s.")
    return CloudFailure("the server was too slow", error, "unreachable", reached=reached)


def unreachable(url: str, error: httpx.HTTPError, *, reached: bool = True) -> CloudFailure:
    """Map a failed connection, or a connection lost before the answer began, to a failure."""
    if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
        stopped = RequestTimeoutError(f"The cloud at {url} stopped answering.")
        return CloudFailure("the server was too slow", stopped, "unreachable", reached=reached)
    detail = str(error) or type(error).__name__
    if not isinstance(error, httpx.TransportError):
        return invalid_answer(url, f"the answer is malformed: {detail}")
    is_lost = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout | httpx.ProxyError)
    failed = CloudUnreachableError(f"The cloud at {url} cannot be reached: {detail}")
    return CloudFailure(
        f"the server cannot be reached: {detail}", failed, "unreachable", reached=reached and not is_lost
    )


def circuit_open(url: str, cause: str, seconds: float) -> CloudFailure:
    """Return the failure of an open circuit: requests failed for `cause`, and no request is sent for `seconds`."""
    message = f"The cloud at {url} is not asked for {seconds:.0f} s, because its last requests failed: {cause}."
    body = completed({"message": message, "code": CloudUnreachableError.default_code}, 502, "")
    error = RelayedError(502, body, retry_after=str(math.ceil(seconds)))
    return CloudFailure(f"no requests are sent for a while, because {cause}", error, "unreachable", reached=False)


def misconfigured(error: UpdraftError) -> CloudFailure:
    """Return the failure of a cloud that cannot be asked with these settings or this request."""
    return CloudFailure(error.message, error, "refused", reached=False)


def cut(url: str, detail: str) -> CloudFailure:
    error = UpstreamError(f"The stream of the cloud at {url} was cut before its end: {detail}")
    return CloudFailure("the stream was cut", error, "unreachable")


def invalid_answer(url: str, what: str) -> CloudFailure:
    return CloudFailure(what, UpstreamError(f"The cloud at {url} failed: {what}."), "invalid_answer")


def _relayed(cause: str, status: int, error: RelayedError, should_retry: str | None) -> CloudFailure:
    spent = not _SPENT.isdisjoint((str(error.code), error.type))
    passing = status in _TRANSIENT or status >= 500
    kind: FailureKind = "unreachable" if passing and status not in (409, 425) and not spent else "refused"
    transient = should_retry == "true" or (passing and should_retry != "false")
    failure = CloudFailure(cause, error, kind)
    failure.transient = transient and not spent
    return failure


def _redirected(url: str, status: int, location: str) -> CloudFailure:
    target = "an unknown target"
    with suppress(httpx.InvalidURL, ValueError):
        target = shown_url(str(httpx.URL(url).join(location)))[:_MAX_URL] if location else target
    cause = f"the server answered {status}, a redirect to {target}"
    message = (
        f"The cloud at {url} answered {status}, a redirect to {target}. Redirects are never followed, since the target "
        "would read the prompt. If you trust it, set cloud_url to it."
    )
    error = RelayedError(502, completed({"message": message, "code": "redirected"}, 502, ""))
    return CloudFailure(cause, error, "refused", status=status)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the wait in seconds from a Retry-After number or date, or None."""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * scale
        except ValueError:
            continue
        if math.isfinite(seconds):
            return max(0.0, seconds)
    try:
        return max(0.0, parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


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
                never_reached = failure.unbilled and failure.status is None and not failure.is_timeout
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
