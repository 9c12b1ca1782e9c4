"""Whether predictions are verified whole: by how many held, and by what steps and tokens were measured to cost."""

from __future__ import annotations

import pytest
from updraft.cloud_engine.engine.speculation.prediction_trust import PredictionTrust
from updraft.cloud_engine.engine.speculation.step_costs import StepReport


def trust(held: int, failed: int) -> PredictionTrust:
    record = PredictionTrust()
    for _ in range(failed):
        record.add(False)
    for _ in range(held):
        record.add(True)
    return record


def measured(record: PredictionTrust, *, step_ms: float, token_ms: float, sequences: int = 1) -> PredictionTrust:
    """`step_ms`: time of a step with this number of sequences. `token_ms`: time per further token."""
    for _ in range(3):
        record.observe(StepReport(sequences, step_ms / 1e3))
        record.observe(StepReport(sequences, (step_ms + 64 * token_ms) / 1e3, prefill_tokens=64))
    return record


def test_while_nothing_is_measured_three_of_four_must_hold() -> None:
    assert trust(0, 0).takes_whole(1000, 1)
    assert trust(3, 1).takes_whole(1000, 1)
    assert not trust(2, 1).takes_whole(1, 1)
    assert trust(32, 32).takes_whole(1000, 1), "the oldest are forgotten"


@pytest.mark.parametrize(
    ("held", "failed", "step_ms", "token_ms", "num_further", "whole"),
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
    held: int, failed: int, step_ms: float, token_ms: float, num_further: int, whole: bool
) -> None:
    record = measured(trust(held, failed), step_ms=step_ms, token_ms=token_ms)
    assert record.takes_whole(num_further, 1) is whole


def test_a_step_of_many_costs_each_of_them_its_share() -> None:
    """The cost of a longer step for the others in a batch is weighed against a share of a step, not all of it."""
    record = measured(trust(6, 2), step_ms=10, token_ms=0.2)
    measured(record, step_ms=16, token_ms=0.2, sequences=32)
    assert (record.takes_whole(60, 1), record.takes_whole(60, 32)) == (True, False)


def test_costs_are_kept_per_batch_size() -> None:
    """Eight sequences take not eight times as long as one: what is beyond a plain step of eight is the tokens'."""
    record = trust(0, 32)
    for _ in range(3):
        record.observe(StepReport(1, 8e-3))
    for _ in range(8):
        record.observe(StepReport(8, 60e-3, prefill_tokens=200))
    assert not record.takes_whole(1000, 1)
    assert not record.takes_whole(1000, 8)


def test_tokens_that_seem_to_cost_nothing_are_no_measurement() -> None:
    record = measured(trust(2, 6), step_ms=10, token_ms=0.0)
    assert not record.takes_whole(1, 1)
