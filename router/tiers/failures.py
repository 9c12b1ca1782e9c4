"""Failures of a cloud: their kinds, the mapping from HTTP errors to kinds, and the error that the caller gets."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import httpx

from ...protocol.errors import CloudUnreachableError, RequestTimeoutError, UpdraftError, UpstreamError
from ...protocol.http.lenient_json import completed, error_in
from ...protocol.safety.redaction import shown_url
from ..request.json_narrowing import table
from .interfaces import Fallback

#: Why the cloud gave no answer: it refused the request or the settings; it was unreachable, slow, busy or broken; its
#: answer was invalid; or the router did not ask it.
FailureKind = Literal["refused", "unreachable", "invalid_answer", "not_asked"]

_TRANSIENT = frozenset({408, 409, 425, 429})  # statuses to retry, in addition to all 5xx
_SPENT = frozenset({"insufficient_quota", "billing_hard_limit_reached", "billing_not_active", "budget_exceeded"})
_MAX_URL = 300  # characters


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
        return {"error": {**self._error, "message": self.message}}

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


def timed_out(url: str, seconds: float) -> CloudFailure:
    error = RequestTimeoutError(f"The cloud at {url} did not answer within {seconds:.1f} s.")
    return CloudFailure("the server was too slow", error, "unreachable")


def unreachable(url: str, error: httpx.HTTPError) -> CloudFailure:
    """Map a failed connection, or a connection lost before the answer began, to a failure."""
    if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
        stopped = RequestTimeoutError(f"The cloud at {url} stopped answering.")
        return CloudFailure("the server was too slow", stopped, "unreachable")
    detail = str(error) or type(error).__name__
    if not isinstance(error, httpx.TransportError):
        return invalid_answer(url, f"the answer is malformed: {detail}")
    reached = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout | httpx.ProxyError)
    failed = CloudUnreachableError(f"The cloud at {url} cannot be reached: {detail}")
    return CloudFailure(f"the server cannot be reached: {detail}", failed, "unreachable", reached=reached)


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
