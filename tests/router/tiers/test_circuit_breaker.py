"""A cloud that is down is left alone, is probed by one request, and comes back with it."""

from __future__ import annotations

import asyncio
import time

import pytest
from updraft.router.tiers import circuit_breaker
from updraft.router.tiers.circuit_breaker import COOL_DOWN_S, FAILURES_TO_OPEN, MAX_COOL_DOWN_S, CircuitBreaker
from updraft.router.tiers.failures import CloudFailure, invalid_answer, refused, timed_out
from updraft.router.tiers.retries import retried

URL = "http://cloud.example/v1"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def fail(breaker: CircuitBreaker, failure: CloudFailure) -> CloudFailure:
    with pytest.raises(CloudFailure) as caught, breaker.attempt():
        raise failure
    return caught.value


def opened(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker(URL, clock)
    for _ in range(FAILURES_TO_OPEN):
        fail(breaker, timed_out(URL, 1.0))
    return breaker


def circuit_open(breaker: CircuitBreaker) -> bool:
    return "left alone" in fail(breaker, timed_out(URL, 1.0)).cause


def test_an_open_one_asks_nobody_and_says_so() -> None:
    breaker = opened(Clock())
    assert breaker.is_open
    failure = fail(breaker, AssertionError("it is not asked"))  # type: ignore[arg-type]
    assert URL in failure.error.message
    assert "too slow" in failure.error.message
    assert failure.error.headers()["retry-after"] == str(int(COOL_DOWN_S))
    assert failure.unbilled


@pytest.mark.parametrize(
    "answer", [invalid_answer("it is odd"), refused(URL, 401, {}, b""), refused(URL, 429, {}, b"")]
)
def test_who_answers_is_reached(answer: CloudFailure) -> None:
    breaker = CircuitBreaker(URL, Clock())
    for _ in range(3):
        for _ in range(FAILURES_TO_OPEN - 1):
            fail(breaker, refused(URL, 503, {}, b""))
        fail(breaker, answer)
    assert not breaker.is_open


def test_one_probe_closes_it_or_doubles_the_wait() -> None:
    clock = Clock()
    breaker = opened(clock)
    for wait in (COOL_DOWN_S, 2 * COOL_DOWN_S, 4 * COOL_DOWN_S, MAX_COOL_DOWN_S, MAX_COOL_DOWN_S):
        clock.now += wait - 0.1
        assert circuit_open(breaker)
        clock.now += 0.2
        assert not circuit_open(breaker)
        assert circuit_open(breaker)
    clock.now += MAX_COOL_DOWN_S + 1
    with breaker.attempt():
        assert circuit_open(breaker), "one probe at a time"
    assert not breaker.is_open
    for _ in range(FAILURES_TO_OPEN - 1):
        assert not circuit_open(breaker)
    assert not breaker.is_open


def test_a_probe_whose_caller_leaves_is_anothers_turn() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += COOL_DOWN_S
    with pytest.raises(asyncio.CancelledError), breaker.attempt():
        raise asyncio.CancelledError
    with breaker.attempt():
        pass
    assert not breaker.is_open


# Retries


def attempts(*failures: CloudFailure | None, time_left_s: float = 30.0) -> tuple[int, float, CloudFailure | None]:
    """How many were made, how long they took, and the failure in the end."""
    made: list[CloudFailure | None] = []

    async def attempt() -> str:
        made.append(failures[len(made)])
        if (failure := made[-1]) is not None:
            raise failure
        return "answer"

    began = time.monotonic()
    try:
        assert asyncio.run(retried(attempt, CircuitBreaker(URL), began + time_left_s)) == "answer"
    except CloudFailure as failure:
        return len(made), time.monotonic() - began, failure
    return len(made), time.monotonic() - began, None


def busy(seconds: str) -> CloudFailure:
    return refused(URL, 429, {"retry-after": seconds}, b"")


def test_what_passes_is_tried_again_after_the_wait_that_the_server_asks_for() -> None:
    made, took, failure = attempts(busy("0.2"), busy("0.3"), None)
    assert (made, failure) == (3, None)
    assert took >= 0.49
    assert attempts(busy("0"), busy("0"), busy("0"))[0] == 3


@pytest.mark.parametrize("failure", [busy("3600"), refused(URL, 401, {}, b""), invalid_answer("it is odd")])
def test_what_does_not_pass_in_time_is_tried_once(failure: CloudFailure) -> None:
    made, took, raised = attempts(failure)
    assert (made, raised) == (1, failure)
    assert took < 5


def test_a_retry_that_is_refused_hides_no_bill() -> None:
    lost = timed_out(URL, 1.0)
    lost.retry_after_s = 0.0
    _, _, failure = attempts(lost, refused(URL, 400, {}, b""))
    assert failure is not None
    assert not failure.unbilled


def test_a_circuit_that_opens_ends_the_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "FAILURES_TO_OPEN", 1)
    made, _, failure = attempts(refused(URL, 503, {}, b""))
    assert made == 1
    assert failure is not None
    assert failure.status == 503, "what it answered, not that it is left alone now"
