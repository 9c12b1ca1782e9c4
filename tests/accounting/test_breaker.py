"""The breaker that router and gateway share: distinct requests open it, a recovery and one good answer close it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from updraft.accounting.breaker import Breaker, BreakerRules

TIMED = BreakerRules(failures_to_open=3, recovery=10.0, max_recovery=60.0, window_s=60.0)
PROBED = BreakerRules(failures_to_open=5, recovery=2, max_recovery=64, by_probes=True)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def timed() -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(TIMED, clock), clock


def opened(breaker: Breaker) -> None:
    for number in range(TIMED.failures_to_open):
        breaker.failed("it broke", b"%d" % number)
    assert breaker.state == "open"


def test_probes_half_open_it_and_repeaters_need_more_of_them() -> None:
    breaker = Breaker.unproven(PROBED)
    assert breaker.state == "open"
    assert breaker.probed()
    assert breaker.state == "closed"
    for trip, probes in enumerate((2, 4, 8), 1):
        assert breaker.trip("it broke")
        assert not breaker.trip("again, of the same fault")
        assert (breaker.trips, breaker.reason) == (trip, "again, of the same fault")
        assert [breaker.probed() for _ in range(probes)] == [False] * (probes - 1) + [True]
        assert breaker.needs_trial
    breaker.succeeded()
    assert breaker.state == "closed"
    breaker.trip("later")
    assert [breaker.probed() for _ in range(2)] == [False, True]
    breaker.succeeded()
    assert [breaker.failed("error") for _ in range(5)] == [False] * 4 + [True]
    breaker.succeeded()
    assert breaker.state == "open", "an answer that was on its way ends no recovery by probes"
    for _ in range(2):
        breaker.probed()
    assert breaker.failed("error"), "a trial that fails opens it again"


def test_one_trial_closes_it_or_doubles_the_recovery() -> None:
    breaker, clock = timed()
    opened(breaker)
    for number, wait in enumerate((10, 20, 40, 60, 60)):
        clock.now += wait - 0.1
        assert breaker.admit() == "refused"
        clock.now += 0.2
        assert [breaker.admit(), breaker.admit()] == ["trial", "refused"]
        breaker.failed("still", b"trial %d" % number)
        assert breaker.state == "open"
    clock.now += 60
    assert breaker.admit() == "trial"
    breaker.succeeded()
    assert (breaker.state, breaker.admit(), breaker.reason) == ("closed", "pass", "")
    opened(breaker)
    assert breaker.seconds_left == 10, "a good answer resets the recovery"


def test_a_trial_of_a_request_that_failed_before_is_anothers_turn() -> None:
    breaker, clock = timed()
    opened(breaker)
    clock.now += 10
    for _ in range(5):
        assert breaker.admit() == "trial"
        assert not breaker.failed("the same", b"1")
    assert breaker.admit() == "trial"
    breaker.leave_trial()
    assert breaker.admit() == "trial"
    breaker.succeeded()
    assert breaker.state == "closed"


def test_failures_that_are_long_ago_do_not_count() -> None:
    breaker, clock = timed()
    for number in range(20):
        assert not breaker.failed("now and then", b"%d" % number)
        clock.now += 31
    for _ in range(2):
        breaker.failed("at once")
    assert breaker.state == "open"


@given(st.integers(1, 200))
def test_one_request_opens_nothing_however_often_it_fails(times: int) -> None:
    breaker, _ = timed()
    for _ in range(times):
        assert not breaker.failed("500", b"poison")
    assert breaker.admit() == "pass"


Events = st.lists(st.tuples(st.sampled_from(["fail", "answer", "anonymous"]), st.integers(0, 9)), max_size=60)


@given(Events)
def test_breaker_opens_at_the_third_distinct_failure_in_a_row(events: list[tuple[str, int]]) -> None:
    breaker, _ = timed()
    in_a_row: set[Any] = set()
    for number, (kind, body) in enumerate(events):
        if kind == "answer":
            breaker.succeeded()
            in_a_row.clear()
            continue
        in_a_row.add(body if kind == "fail" else f"anonymous {number}")
        breaker.failed("500", b"%d" % body if kind == "fail" else None)
        assert (breaker.state == "open") == (len(in_a_row) >= 3)
        if breaker.state == "open":
            return


@given(st.lists(st.binary(min_size=1, max_size=8), max_size=300), st.integers(1, 20))
def test_its_memory_is_bounded(bodies: list[bytes], wait: int) -> None:
    breaker, clock = timed()
    for body in bodies:
        breaker.failed("500", body)
        clock.now += wait
        breaker.admit()
    assert len(breaker._failures) <= 64


@given(st.lists(st.sampled_from(["admit", "fail", "same", "answer", "leave", "wait"]), max_size=80))
def test_a_recovery_always_ends(steps: list[str]) -> None:
    """Whatever came before: after the longest recovery a trial is admitted, and its answer closes the breaker."""
    breaker, clock = timed()
    for number, step in enumerate(steps):
        if step == "admit":
            breaker.admit()
        elif step == "answer":
            breaker.succeeded()
        elif step == "leave":
            breaker.leave_trial()
        elif step == "wait":
            clock.now += 7
        else:
            breaker.failed("500", b"same" if step == "same" else b"%d" % number)
    breaker.leave_trial()
    clock.now += TIMED.max_recovery
    assert breaker.admit() in ("pass", "trial")
    breaker.succeeded()
    assert breaker.admit() == "pass"
