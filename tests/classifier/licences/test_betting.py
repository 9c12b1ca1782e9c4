"""Tests by betting: rare false licences whenever one looks, and soon an end to a licence that broke its promise."""

from __future__ import annotations

from math import sqrt
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.classifier.licences.betting import LadderTest, RevocationTest, num_licensed, rows_to_license

QUALITY, DELTA = 0.95, 0.1


@given(
    rows=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(0, 5)), max_size=60),
    quality=st.floats(0.5, 1.0),
)
def test_rows_one_by_one_give_the_licence_of_the_whole(rows: list[tuple[float, float, int]], quality: float) -> None:
    test, steps = LadderTest(5, quality, DELTA), np.arange(5)
    worth = [np.zeros((0, 5))]
    for local, cloud, first_step in rows:
        test.observe(local, cloud, first_step)
        worth.append(np.where(steps >= first_step, local, cloud)[None] - quality * cloud)
    assert num_licensed(np.concatenate(worth), DELTA, quality) == test.num_licensed if rows else test.num_licensed == 0
    assert 0 <= test.evidence <= 1


@pytest.mark.parametrize("cloud", [1.0, 0.8])
def test_an_answer_at_the_target_is_rarely_licensed_at_any_time(cloud: float) -> None:
    rng, runs = np.random.default_rng(0), 400
    local = rng.random((runs, 1500)) < QUALITY * cloud
    scores = rng.random((runs, 1500)) < cloud
    licensed = sum(num_licensed((a - QUALITY * c)[:, None], DELTA, QUALITY) for a, c in zip(local, scores, strict=True))
    assert licensed / runs <= DELTA + 3 * sqrt(DELTA * (1 - DELTA) / runs)


def test_a_later_step_needs_all_steps_before_it() -> None:
    test = LadderTest(3, QUALITY, DELTA)
    for _ in range(300):  # the second step keeps an answer that is wrong, and the third would keep another, right one
        test.observe(0.0, 1.0, 1)
        test.observe(1.0, 1.0, 2)
    assert test.num_licensed == 1


@pytest.mark.parametrize(("fall", "most"), [(0.1, 75), (0.05, 170), (0.02, 450)])
def test_a_licence_ends_soon_after_a_fall(fall: float, most: int) -> None:
    rng = np.random.default_rng(1)

    def rows() -> int:
        watch, count = RevocationTest(QUALITY), 0
        while not watch.is_revoked:
            watch.observe(float(rng.random() < QUALITY - fall), 1.0)
            count += 1
        return count

    assert median(rows() for _ in range(200)) <= most


def test_a_kept_promise_hardly_ever_ends() -> None:
    rng, watch = np.random.default_rng(2), RevocationTest(QUALITY)
    for right in rng.random(50_000) < 0.98:
        watch.observe(float(right), 1.0)
        assert not watch.is_revoked


def test_rows_to_license_is_about_what_a_test_takes() -> None:
    for quality in (0.9, 0.95, 0.98):
        test, count = LadderTest(1, quality, DELTA), 0
        while not test.num_licensed:
            test.observe(1.0, 1.0, 0)
            count += 1
        expected = rows_to_license(np.array([1.0 - quality]), DELTA, quality)
        assert expected is not None
        assert 0.85 * count <= expected <= 1.15 * count
    assert rows_to_license(np.array([-0.1, 0.05]), DELTA, 0.95) is None
