"""A cloud that is down or hangs is left alone and is probed by one request; one bad request is no outage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import unused_url
from updraft.router.tiers import failures
from updraft.router.tiers.cloud import HttpCloudTier
from updraft.router.tiers.connection import CloudEndpoint
from updraft.router.tiers.failures import (
    HUNG_S,
    RULES,
    CloudCalls,
    CloudFailure,
    invalid_answer,
    refused,
    timed_out,
    unreachable,
)

URL = "http://cloud.example/v1"
COOL_DOWN_S = RULES.recovery


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def calls(timeout_s: float = HUNG_S) -> tuple[CloudCalls, Clock]:
    clock = Clock()
    return CloudCalls(URL, timeout_s, clock), clock


async def ask(cloud: CloudCalls, attempt: Callable[[], Awaitable[str]], body: bytes = b"body") -> str:
    return await cloud.ask(attempt, time.monotonic(), lambda: body)  # no time is left for another attempt


def fail(cloud: CloudCalls, failure: CloudFailure, body: bytes = b"body", after_s: float = 0.0) -> CloudFailure:
    async def attempt() -> str:
        cloud._clock.now += after_s  # type: ignore[attr-defined]
        raise failure

    with pytest.raises(CloudFailure) as caught:
        asyncio.run(ask(cloud, attempt, body))
    return caught.value


async def answers() -> str:
    return "answer"


def broken() -> CloudFailure:
    return refused(URL, 500, {}, b"")


def opened() -> tuple[CloudCalls, Clock]:
    cloud, clock = calls()
    for number in range(RULES.failures_to_open):
        if not cloud.is_open:
            fail(cloud, timed_out(URL, HUNG_S), b"%d" % number, after_s=HUNG_S)
    assert cloud.is_open
    return cloud, clock


def test_an_open_one_asks_nobody_and_says_so() -> None:
    cloud, _ = opened()
    assert cloud.is_open
    failure = fail(cloud, AssertionError("it is not asked"))  # type: ignore[arg-type]
    assert URL in failure.error.message
    assert "too slow" in failure.error.message
    assert failure.error.headers()["retry-after"] == str(int(COOL_DOWN_S))
    assert failure.unbilled


@pytest.mark.parametrize(
    "answer", [invalid_answer(URL, "it is odd"), refused(URL, 401, {}, b""), refused(URL, 429, {}, b"")]
)
def test_any_answer_resets_the_failures(answer: CloudFailure) -> None:
    cloud, _ = calls()
    for _ in range(3):
        for number in range(RULES.failures_to_open - 1):
            fail(cloud, refused(URL, 503, {}, b""), b"%d" % number)
        fail(cloud, answer)
    assert not cloud.is_open


@given(st.lists(st.sampled_from([b"poison", b"good"]), max_size=30))
def test_one_request_that_the_cloud_answers_with_500_is_no_outage(bodies: list[bytes]) -> None:
    cloud, _ = calls()
    for body in bodies:
        if body == b"good":
            assert asyncio.run(ask(cloud, answers, body)) == "answer"
        else:
            assert fail(cloud, broken(), body).status == 500
    assert not cloud.is_open


@pytest.mark.parametrize("status", [500, 503])
def test_however_many_bodies_the_cloud_answers_with_5xx_the_next_good_one_is_sent(status: int) -> None:
    cloud, _ = calls()
    for number in range(10):
        assert fail(cloud, refused(URL, status, {}, b""), b"%d" % number).status == status
    assert asyncio.run(ask(cloud, answers)) == "answer"
    assert not cloud.is_open


def test_a_trial_with_a_request_that_failed_before_leaves_the_next_one_the_turn() -> None:
    cloud, clock = opened()
    clock.now += COOL_DOWN_S
    for _ in range(3):
        assert fail(cloud, broken(), b"1").status == 500
    assert asyncio.run(ask(cloud, answers)) == "answer"
    assert not cloud.is_open


def test_a_trial_that_fails_doubles_the_wait_and_one_trial_is_made_at_a_time() -> None:
    cloud, clock = opened()
    for number, wait in enumerate((COOL_DOWN_S, 2 * COOL_DOWN_S)):
        clock.now += wait - 0.1
        assert "no requests are sent for a while" in fail(cloud, broken()).cause
        clock.now += 0.2
        assert fail(cloud, timed_out(URL, 1.0), b"new %d" % number).is_timeout
        assert "no requests are sent for a while" in fail(cloud, broken()).cause
    clock.now += 4 * COOL_DOWN_S

    async def two_at_once() -> tuple[str | BaseException, str | BaseException]:
        return await asyncio.gather(ask(cloud, answers), ask(cloud, answers), return_exceptions=True)

    first, second = asyncio.run(two_at_once())
    assert first == "answer"
    assert isinstance(second, CloudFailure), "one trial at a time"
    assert not cloud.is_open


def test_a_trial_whose_caller_leaves_is_anothers_turn() -> None:
    cloud, clock = opened()
    clock.now += COOL_DOWN_S

    async def leave_and_come() -> str:
        leaving = asyncio.create_task(ask(cloud, asyncio.Event().wait))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait((leaving,))
        return await ask(cloud, answers)

    assert asyncio.run(leave_and_come()) == "answer"
    assert not cloud.is_open


def test_two_requests_that_meet_a_silent_cloud_open_it_and_one_that_is_repeated_does_not() -> None:
    cloud, _ = calls(60.0)
    for _ in range(5):
        fail(cloud, timed_out(URL, HUNG_S), b"a long answer", after_s=HUNG_S)
    assert not cloud.is_open
    fail(cloud, timed_out(URL, HUNG_S), b"another", after_s=HUNG_S)
    assert cloud.is_open


def test_an_answer_ends_a_silence() -> None:
    cloud, _ = calls(60.0)
    for number in range(5):
        fail(cloud, timed_out(URL, HUNG_S), b"%d" % number, after_s=HUNG_S)
        assert asyncio.run(ask(cloud, answers)) == "answer"
    assert not cloud.is_open


def test_neither_a_short_deadline_nor_one_slow_answer_among_others_opens_it() -> None:
    cloud, clock = calls(60.0)
    for number in range(3 * RULES.failures_to_open):
        fail(cloud, timed_out(URL, 1.0), b"%d" % number, after_s=1.0)
    assert not cloud.is_open

    async def slow() -> str:
        clock.now += HUNG_S
        assert await ask(cloud, answers) == "answer"  # another one's
        clock.now += HUNG_S
        raise timed_out(URL, 2 * HUNG_S)

    with pytest.raises(CloudFailure):
        asyncio.run(ask(cloud, slow))
    assert not cloud.is_open


def test_one_request_that_never_reaches_the_cloud_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_BACKOFF_S", (0.0, 0.0))

    async def test() -> None:
        tier = HttpCloudTier(CloudEndpoint(f"{unused_url()}/v1"))
        for cause in ("the server cannot be reached", "no requests are sent for a while"):
            with pytest.raises(CloudFailure, match=cause):
                await tier.complete("chat/completions", {"model": "m", "messages": []}, timeout_s=30)
        await tier.aclose()

    asyncio.run(test())


def test_a_connection_that_breaks_is_due_to_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_BACKOFF_S", (0.0, 0.0))
    cloud, _ = calls()
    until = time.monotonic() + 30

    async def crash() -> str:
        raise unreachable(URL, httpx.RemoteProtocolError("Server disconnected"))

    for _ in range(5):
        with pytest.raises(CloudFailure, match="disconnected"):
            asyncio.run(cloud.ask(crash, until, lambda: b"one body"))
    assert not cloud.is_open
    for body in (b"two", b"three"):
        with pytest.raises(CloudFailure, match="disconnected"):
            asyncio.run(cloud.ask(crash, until, lambda body=body: body))
    assert cloud.is_open
    for body in (b"four", b"five"):
        with pytest.raises(CloudFailure, match="disconnected"):
            asyncio.run(ask(cloud, crash, body))
    assert asyncio.run(ask(cloud, answers)) == "answer", "the cloud accepts connections, so the next request is a trial"
    assert not cloud.is_open


class Stream:
    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def aclose(self) -> None:
        self.closed.set()


def test_late_trial_answer_closes_the_circuit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "TRIAL_WAIT_S", 0.01)
    cloud, clock = opened()
    clock.now += COOL_DOWN_S
    come, stream = asyncio.Event(), Stream()

    async def late() -> Stream:
        await come.wait()
        return stream

    async def test() -> None:
        with pytest.raises(CloudFailure, match="too slow") as caught:
            await ask(cloud, late)  # type: ignore[arg-type]
        assert not caught.value.unbilled, "the cloud may still answer"
        with pytest.raises(CloudFailure, match="no requests are sent for a while"):
            await ask(cloud, answers)
        come.set()
        await stream.closed.wait()
        assert await ask(cloud, answers) == "answer"

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_hung_cloud_costs_two_requests_their_timeout() -> None:
    async def test() -> None:
        asked: list[asyncio.StreamWriter] = []  # what is not kept is closed
        server = await asyncio.start_server(lambda _, writer: asked.append(writer), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        tier = HttpCloudTier(CloudEndpoint(url, timeout_s=1.0))
        causes: list[str] = []
        for ask, prompt in ((tier.complete, "1"), (tier.complete, "1"), (tier.open, "2"), (tier.complete, "3")):
            with pytest.raises(CloudFailure) as caught:
                await ask("chat/completions", {"model": "m", "messages": [prompt]}, timeout_s=1.0)
            causes.append(caught.value.cause)
            assert url in caught.value.error.message
        assert [cause.partition(",")[0] for cause in causes] == [
            *["the server was too slow"] * 3,
            "no requests are sent for a while",
        ], "a prompt that takes too long, also when it is repeated, keeps no other from the cloud"
        assert len(asked) == 3
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
        asked = CloudCalls(URL).ask(attempt, began + time_left_s, lambda: b"body")
        assert asyncio.run(asked) == "answer"
    except CloudFailure as failure:
        return len(made), time.monotonic() - began, failure
    return len(made), time.monotonic() - began, None


def busy(seconds: str) -> CloudFailure:
    return refused(URL, 429, {"retry-after": seconds}, b"")


def test_transient_failures_are_retried_after_the_requested_wait() -> None:
    made, took, failure = attempts(busy("0.2"), busy("0.3"), None)
    assert (made, failure) == (3, None)
    assert took >= 0.49
    assert attempts(busy("0"), busy("0"), busy("0"))[0] == 3


@pytest.mark.parametrize("failure", [busy("3600"), refused(URL, 401, {}, b""), invalid_answer(URL, "it is odd")])
def test_waits_beyond_the_deadline_are_not_retried(failure: CloudFailure) -> None:
    made, took, raised = attempts(failure)
    assert (made, raised) == (1, failure)
    assert took < 25, "it had 30 s"


def test_a_retry_that_is_refused_hides_no_bill() -> None:
    lost = timed_out(URL, 1.0)
    lost.retry_after_s = 0.0
    _, _, failure = attempts(lost, refused(URL, 400, {}, b""))
    assert failure is not None
    assert not failure.unbilled


def test_a_circuit_that_opens_ends_the_retries() -> None:
    cloud, _ = calls()
    made: list[int] = []

    async def attempt() -> str:
        made.append(1)
        for number in range(RULES.failures_to_open):  # those of others, meanwhile
            cloud._breaker.failed("500", b"%d" % number)
        raise refused(URL, 503, {}, b"")

    with pytest.raises(CloudFailure) as caught:
        asyncio.run(cloud.ask(attempt, time.monotonic() + 30, lambda: b"body"))
    assert (len(made), caught.value.status) == (1, 503), "what it answered, not that it is left alone now"
