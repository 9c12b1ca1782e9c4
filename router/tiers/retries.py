"""Trying a cloud again: only what may pass, within the time there is, and not sooner than the server asks for."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from .circuit_breaker import CircuitBreaker
from .failures import CloudFailure

_BACKOFF_S = (0.5, 1.0)  # before the second and the third attempt, where the server names no time
_JITTER = 0.25  # of that, so that many clients do not come back at once

T = TypeVar("T")


async def retried(attempt: Callable[[], Awaitable[T]], breaker: CircuitBreaker, until: float) -> T:
    """The result of the first of three attempts that succeeds. Raises the CloudFailure of the last one.

    `until`: the end of the caller's patience, on the clock of `time.monotonic`. A wait beyond it is not begun, and
    where the server names no time, none that would take more than half of what is left: another tier may need it.
    """
    billed = False
    for backoff_s in (*_BACKOFF_S, None):
        try:
            return await breaker.ask(attempt)
        except CloudFailure as failure:
            billed = billed or not failure.unbilled
            failure.unbilled = not billed
            if backoff_s is None or not failure.transient or breaker.is_open:
                raise
            left_s = until - time.monotonic()
            wait_s = failure.retry_after_s
            if wait_s is None:
                wait_s, left_s = backoff_s * (1 + _JITTER * random.random()), left_s / 2
            if wait_s >= left_s:
                raise
            await asyncio.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")
