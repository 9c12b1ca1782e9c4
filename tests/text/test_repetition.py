"""Endless repetition is distinguished from answers whose lines only look alike."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.text.repetition import INTERVAL, MAX_PERIOD, MIN_REPEATS, SPAN, next_check, repeats


def ends_at(tokens: list[int]) -> int | None:
    """The length at which an answer that grows token by token is ended."""
    return next((length for length in range(1, len(tokens) + 1) if repeats(tokens[:length], length)), None)


def varied(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(40_000), k=count)


@pytest.mark.parametrize("period", [1, 2, 3, 7, 31, 64, 100, MAX_PERIOD])
@pytest.mark.parametrize("before", [0, 1, 50, 333])
def test_a_loop_is_ended_soon_after_it_is_one(period: int, before: int) -> None:
    loop = varied(period, 1)
    end = ends_at(varied(before) + loop * (1200 // period))
    assert end is not None
    assert max(SPAN, MIN_REPEATS * period) <= end < before + max(SPAN, MIN_REPEATS * period) + INTERVAL


@pytest.mark.parametrize(
    "answer",
    [
        [15, 11] * 100,  # a hundred zeros with commas
        varied(30) + [7] * 200 + varied(400, 1),
        [token for row in range(200) for token in (9, 100 + row, 9, 9, 4, 9)],  # a table: same frame, other cells
        [token for line in range(150) for token in (3, 3, 3, 3, *varied(5, line))],  # indented code
        varied(3000),
        varied(100) * 3 + varied(200, 5),  # a paragraph quoted twice
        [1] * 8000 + [2],  # ended long ago, looked at only here
    ],
    ids=["zeros", "run", "table", "code", "prose", "quoted", "late"],
)
def test_similar_text_is_not_repetition(answer: list[int]) -> None:
    if answer[0] == 1:
        assert not repeats(answer, len(answer))
    else:
        assert ends_at(answer) is None


@given(st.integers(1, 6), st.integers(1, 700), st.integers(0, 200))
def test_the_prompt_is_no_part_of_the_answer(period: int, length: int, prompt: int) -> None:
    answer = list(range(period)) * 700
    before = list(range(period)) * prompt  # in step with the answer
    assert repeats(before[: len(before)] + answer[:length], length) == repeats(answer[:length], length)


@given(st.integers(0, 5000))
def test_the_next_look_is_ahead_and_at_a_fixed_length(written: int) -> None:
    upcoming = next_check(written)
    assert upcoming > written and upcoming % INTERVAL == 0 and upcoming >= SPAN
    assert not any(repeats([1] * between, between) for between in range(written + 1, upcoming))
