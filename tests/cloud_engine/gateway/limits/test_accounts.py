"""The arithmetic of limits, for any order of requests: windows are never passed, and what waits gets in."""

from __future__ import annotations

import math
from operator import itemgetter

from hypothesis import given
from hypothesis import strategies as st
from updraft.accounting.accounts import PERIOD_S, AccountUsage, Claim, expires, settled, used

LIMIT = 1000.0
# Seconds since the one before, the estimate, what part of it is used, and how long that takes.
REQUESTS = st.lists(
    st.tuples(st.floats(0, 30), st.integers(1, 400), st.floats(0, 1), st.floats(0, 100)), min_size=1, max_size=40
)


def claim(amount: float) -> Claim:
    return Claim("key", "k", "tokens", LIMIT, amount)


class Bucket:
    """One account over time, as the stores keep it."""

    def __init__(self) -> None:
        self.value = 0.0
        self.running: list[tuple[float, Claim, float]] = []
        self.history: list[tuple[float, float]] = []

    def settle(self, until: float) -> None:
        for ends, asked, actual in sorted((each for each in self.running if each[0] <= until), key=itemgetter(0)):
            self.value = settled(asked, self.value, actual, ends)
            self.history.append((ends, actual))
        self.running = [each for each in self.running if each[0] > until]

    def usage(self, now: float) -> AccountUsage:
        return AccountUsage(used(claim(0), self.value, now), sum(asked.amount for _, asked, _ in self.running))


def after(requests: list[tuple[float, int, float, float]]) -> tuple[Bucket, float]:
    bucket, now = Bucket(), 1e9
    for pause, amount, part, takes in requests:
        now += pause
        bucket.settle(now)
        asked = claim(amount)
        if bucket.usage(now).fits(asked):
            bucket.running.append((now + takes, asked, math.floor(amount * part)))
    return bucket, now


@given(REQUESTS)
def test_no_window_uses_more_than_its_limit(requests: list[tuple[float, int, float, float]]) -> None:
    bucket, now = after(requests)
    bucket.settle(now + 1000)
    for first, (begins, _) in enumerate(bucket.history):
        total = 0.0
        for ends, actual in bucket.history[first:]:
            total += actual
            assert total <= LIMIT * (1 + (ends - begins) / PERIOD_S) + 1e-3


@given(REQUESTS, st.integers(1, 1000))
def test_a_refused_request_fits_after_its_wait(requests: list[tuple[float, int, float, float]], amount: int) -> None:
    """Whatever those in flight use of their reservations."""
    bucket, now = after(requests)
    asked, usage = claim(amount), bucket.usage(now)
    wait_s = usage.wait_s(asked, now)
    assert (wait_s == 0) == (usage.used + usage.reserved + amount <= LIMIT)
    for _, running, _ in bucket.running:
        bucket.value = settled(running, bucket.value, running.amount, now)
    bucket.running = []
    assert bucket.usage(now + wait_s + 1e-3).fits(asked)


@given(REQUESTS)
def test_an_expired_account_is_as_good_as_a_new_one(requests: list[tuple[float, int, float, float]]) -> None:
    bucket, _ = after(requests)
    bucket.settle(math.inf)
    when = expires(claim(0), bucket.value)
    assert used(claim(0), bucket.value, when) == used(claim(0), 0.0, when) == 0
    assert settled(claim(0), bucket.value, 5, when) == settled(claim(0), 0.0, 5, when)


@given(st.lists(st.floats(0, 10), max_size=30), st.floats(0.01, 100))
def test_budget_is_the_sum_of_spending(spent: list[float], limit: float) -> None:
    asked, value = Claim("key", "k", "usd_per_day", limit, 1.0, 86_400.0, 172_800.0), 0.0
    for usd in spent:
        value = settled(asked, value, usd, 100_000.0)
    assert used(asked, value, 150_000.0) == value
    assert math.isclose(value, math.fsum(spent), abs_tol=1e-9)
    in_a_second = value + 1 <= limit  # of what requests in flight have reserved, some may come back
    assert AccountUsage(value, 9).wait_s(asked, 172_000.0) == (1 if in_a_second else 800)
    assert AccountUsage(value, 0).fits(asked) == (value + 1 <= limit * (1 + 1e-9))
