"""Whether predictions are verified whole: by how many held, and by what steps and tokens were measured to cost."""

from __future__ import annotations

import pytest
from updraft.cloud_engine.engine.prediction_trust import PredictionTrust


def trust(held: int, failed: int, *, step_ms: float = 0.0, token_ms: float = 0.0) -> PredictionTrust:
    """`step_ms`: of one sequence alone. 0: nothing was measured."""
    found = PredictionTrust()
    for _ in range(failed):
        found.add(False)
    for _ in range(held):
        found.add(True)
    for _ in range(3 if step_ms else 0):
        found.observe(1, 0, step_ms / 1e3)
        found.observe(1, 40, (step_ms + 40 * token_ms) / 1e3)
    return found


def test_while_nothing_is_measured_three_of_four_must_hold() -> None:
    assert trust(0, 0).takes_whole(1000)
    assert trust(3, 1).takes_whole(1000)
    assert not trust(2, 1).takes_whole(1)
    assert trust(32, 32).takes_whole(1000), "the oldest are forgotten"


@pytest.mark.parametrize(
    ("held", "failed", "step_ms", "token_ms", "num_behind", "whole"),
    [
        (6, 2, 10.0, 0.01, 40, True),  # a GPU: a step costs more than any prediction
        (2, 6, 10.0, 0.01, 40, True),
        (6, 2, 10.0, 2.0, 40, False),  # a CPU: 40 tokens take as long as 8 steps
        (6, 2, 10.0, 2.0, 10, True),
        (2, 6, 10.0, 2.0, 10, False),
        (12, 0, 10.0, 2.0, 40, True),
    ],
)
def test_a_step_saved_is_weighed_against_tokens_wasted(
    held: int, failed: int, step_ms: float, token_ms: float, num_behind: int, whole: bool
) -> None:
    assert trust(held, failed, step_ms=step_ms, token_ms=token_ms).takes_whole(num_behind) is whole


def test_a_step_of_many_costs_each_of_them_its_share() -> None:
    """What a longer step costs the others in a batch is weighed against a share of a step, not all of it."""
    alone, beside = trust(6, 2), trust(6, 2)
    for _ in range(3):
        alone.observe(1, 0, 10e-3)
        beside.observe(32, 0, 10e-3)
        for one, sequences in ((alone, 1), (beside, 32)):
            one.observe(sequences, 64, 10e-3 + 64 * 0.2e-3)
    assert (alone.takes_whole(60), beside.takes_whole(60)) == (True, False)


def test_steps_that_say_little_are_left_out() -> None:
    """A few drafts more or less drown in noise, and without a plain step nobody knows what the rest took."""
    found = trust(2, 6)
    found.observe(1, 40, 1.0)
    for _ in range(3):
        found.observe(1, 0, 10e-3)
        found.observe(1, 8, 1.0)
    assert not found.takes_whole(1), "as while nothing is measured"
