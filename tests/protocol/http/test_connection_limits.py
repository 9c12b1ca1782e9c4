"""The number of connections is limited: the longest idle one is closed, and active ones stay."""

from __future__ import annotations

import logging

from hypothesis import given
from hypothesis import strategies as st
from updraft.protocol.http.access import ConnectionLimits
from updraft.protocol.telemetry.logs import MAX_LINES_A_MINUTE, LogRateLimit


class Fake:
    def __init__(self) -> None:
        self.closed = False

    def close_now(self) -> None:
        self.closed = True


def test_the_longest_idle_connection_is_closed() -> None:
    limits, (first, second, third, fourth) = ConnectionLimits(2, 2), (Fake() for _ in range(4))
    assert limits.admit(first, "10.0.0.1")
    assert limits.admit(second, "10.0.0.2")
    limits.mark_busy(first)
    assert limits.admit(third, "10.0.0.3")
    assert (first.closed, second.closed) == (False, True)
    limits.mark_busy(third)
    assert not limits.admit(fourth, "10.0.0.4"), "all are at work"
    limits.mark_idle(first)
    assert limits.admit(fourth, "10.0.0.4")
    assert first.closed


def test_one_address_takes_its_share_and_this_machine_all() -> None:
    limits = ConnectionLimits(10, 2)
    mine = [Fake() for _ in range(3)]
    for each in mine[:2]:
        assert limits.admit(each, "10.0.0.1")
        limits.mark_busy(each)
    assert not limits.admit(mine[2], "10.0.0.1")
    assert limits.admit(Fake(), "10.0.0.2")
    assert all(limits.admit(Fake(), "127.0.0.1") for _ in range(7)), "a reverse proxy brings everybody's"


STEPS = ["admit", "mark_busy", "mark_idle", "forget"]


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), max_size=80))
def test_never_more_than_allowed(steps: list[tuple[str, int]]) -> None:
    limits, there, addresses = ConnectionLimits(5, 3), list[Fake](), dict[Fake, str]()
    for step, number in steps:
        if step == "admit":
            new = Fake()
            if limits.admit(new, f"10.0.0.{number % 3}"):
                there.append(new)
                addresses[new] = f"10.0.0.{number % 3}"
        elif there:
            chosen = there[number % len(there)]
            getattr(limits, step)(chosen)
            if step == "forget":
                there.remove(chosen)
        there = [each for each in there if not each.closed]
        assert len(there) <= 5
        assert all(sum(addresses[each] == address for each in there) <= 3 for address in addresses.values())
    for each in there:
        limits.forget(each)
    assert not (limits._addresses or limits._resting or limits._all_resting or limits._counts)


def test_a_place_that_logs_without_end_is_cut_short() -> None:
    few, here, there = LogRateLimit(), [], []
    for _ in range(MAX_LINES_A_MINUTE * 3):
        record = logging.LogRecord("updraft", logging.WARNING, "a.py", 1, "said", (), None)
        record.created = 120.0
        here.append(few.filter(record))
        there.append(record.getMessage())
    assert sum(here) == MAX_LINES_A_MINUTE
    assert "suppressed" in there[MAX_LINES_A_MINUTE - 1]
    other = logging.LogRecord("updraft", logging.WARNING, "a.py", 2, "said", (), None)
    other.created = 120.0
    assert few.filter(other)
    other.created = 200.0
    assert few.filter(other)
