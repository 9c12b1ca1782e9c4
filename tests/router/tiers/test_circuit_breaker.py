"""A cloud that is down or hangs is left alone, is probed by one request that nobody waits long for, and comes back."""

from __future__ import annotations

import asyncio
import time

import pytest
from updraft.router.tiers import circuit_breaker
from updraft.router.tiers.circuit_breaker import COOL_DOWN_S, FAILURES_TO_OPEN, HUNG_S, MAX_COOL_DOWN_S, CircuitBreaker
from updraft.router.tiers.cloud import HttpCloudTier
from updraft.router.tiers.connection import CloudEndpoint
from updraft.router.tiers.failures import CloudFailure, invalid_answer, refused, timed_out
from updraft.router.tiers.retries import retried

URL = "http://cloud.example/v1"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def fail(breaker: CircuitBreaker, failure: CloudFailure, after_s: float = 0.0) -> CloudFailure:
    async def attempt() -> str:
        if after_s:
            breaker._clock.now += after_s  # type: ignore[attr-defined]
        raise failure

    with pytest.raises(CloudFailure) as caught:
        asyncio.run(breaker.ask(attempt))
    return caught.value


async def answers() -> str:
    return "answer"


def opened(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker(URL, clock=clock)
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
    "answer", [invalid_answer(URL, "it is odd"), refused(URL, 401, {}, b""), refused(URL, 429, {}, b"")]
)
def test_who_answers_is_reached(answer: CloudFailure) -> None:
    breaker = CircuitBreaker(URL, clock=Clock())
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

    async def two_at_once() -> tuple[str | BaseException, str | BaseException]:
        return await asyncio.gather(breaker.ask(answers), breaker.ask(answers), return_exceptions=True)

    first, second = asyncio.run(two_at_once())
    assert first == "answer"
    assert isinstance(second, CloudFailure), "one probe at a time"
    assert not breaker.is_open
    for _ in range(FAILURES_TO_OPEN - 1):
        assert not circuit_open(breaker)
    assert not breaker.is_open


def test_a_probe_whose_caller_leaves_is_anothers_turn() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += COOL_DOWN_S

    async def leave_and_come() -> str:
        leaving = asyncio.create_task(breaker.ask(asyncio.Event().wait))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait((leaving,))
        return await breaker.ask(answers)

    assert asyncio.run(leave_and_come()) == "answer"
    assert not breaker.is_open


def test_one_request_that_hangs_opens_it() -> None:
    breaker = CircuitBreaker(URL, patience_s=60.0, clock=Clock())
    fail(breaker, timed_out(URL, HUNG_S), after_s=HUNG_S)
    assert breaker.is_open


def test_neither_a_short_deadline_nor_one_slow_answer_among_others_opens_it() -> None:
    clock = Clock()
    breaker = CircuitBreaker(URL, patience_s=60.0, clock=clock)
    fail(breaker, timed_out(URL, 1.0), after_s=1.0)
    assert not breaker.is_open

    async def slow() -> str:
        clock.now += HUNG_S
        assert await breaker.ask(answers) == "answer"  # another one's
        clock.now += HUNG_S
        raise timed_out(URL, 2 * HUNG_S)

    with pytest.raises(CloudFailure):
        asyncio.run(breaker.ask(slow))
    assert not breaker.is_open


class Stream:
    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def aclose(self) -> None:
        self.closed.set()


def test_nobody_waits_long_for_a_probe_and_its_late_answer_closes_the_circuit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "PROBE_WAIT_S", 0.01)
    clock = Clock()
    breaker = opened(clock)
    clock.now += COOL_DOWN_S
    come, stream = asyncio.Event(), Stream()

    async def late() -> Stream:
        await come.wait()
        return stream

    async def test() -> None:
        with pytest.raises(CloudFailure, match="too slow") as caught:
            await breaker.ask(late)
        assert not caught.value.unbilled, "the cloud may still answer"
        with pytest.raises(CloudFailure, match="left alone"):
            await breaker.ask(answers)
        come.set()
        await stream.closed.wait()
        assert await breaker.ask(answers) == "answer"

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_hung_cloud_costs_one_request_its_timeout() -> None:
    async def test() -> None:
        asked: list[asyncio.StreamWriter] = []  # what is not kept is closed
        server = await asyncio.start_server(lambda _, writer: asked.append(writer), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        tier = HttpCloudTier(CloudEndpoint(url, timeout_s=1.0))
        causes: list[str] = []
        for ask in (tier.complete, tier.open, tier.complete):
            with pytest.raises(CloudFailure) as caught:
                await ask("chat/completions", {"model": "m", "messages": []}, timeout_s=1.0)
            causes.append(caught.value.cause)
            assert url in caught.value.error.message
        assert [cause.partition(",")[0] for cause in causes] == [
            "it was too slow",
            *["it is left alone for a while"] * 2,
        ]
        assert len(asked) == 1
        await tier.aclose()
        server.close()
        for writer in asked:
            writer.close()

    asyncio.run(test())


# Retries


def attempts(*failures: CloudFailure | None, time_left_s: float = 30.0) -> tuple[int, float, CloudFailure | None]:
    """The number of tries, their time, and the failure in the end."""
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


@pytest.mark.parametrize("failure", [busy("3600"), refused(URL, 401, {}, b""), invalid_answer(URL, "it is odd")])
def test_what_does_not_pass_in_time_is_tried_once(failure: CloudFailure) -> None:
    made, took, raised = attempts(failure)
    assert (made, raised) == (1, failure)
    assert took < 25, "it had 30 s"


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
