"""The loss by drafts is bounded whatever happens, and each class of batch sizes has an account of its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from updraft.cloud_engine.engine.speculation.draft_length import DraftCredit

MAX_LOSS = 2.0


@given(st.lists(st.tuples(st.booleans(), st.floats(-5.0, MAX_LOSS)), max_size=400))
def test_drafting_on_credit_bounds_the_loss(steps: list[tuple[bool, float]]) -> None:
    credit, lost = DraftCredit(), 0.0
    for number, (wants_to, loss) in enumerate(steps, start=1):
        drafts = wants_to and not credit.is_overdrawn(4)
        credit.settle(4, loss if drafts else 0.0)
        lost += loss if drafts else 0.0
        assert lost <= 6 + MAX_LOSS + 0.01 * number + 1e-9


def test_overdrawn_credit_is_repaid() -> None:
    credit = DraftCredit()
    credit.settle(4, 8.01)
    assert credit.is_overdrawn(5)
    steps = 0
    while credit.is_overdrawn(4):
        credit.settle(4)
        steps += 1
    assert 495 <= steps <= 505
    assert credit.of(4) >= 0


def test_gains_of_one_size_are_not_lost_on_another() -> None:
    credit = DraftCredit()
    for _ in range(100):
        credit.settle(8, -1.0)
    assert credit.of(9) == 64
    assert credit.of(16) == credit.of(7) == 3


def test_drafts_that_earn_what_they_owe_are_not_stopped_again() -> None:
    credit = DraftCredit()
    credit.settle(1, 20.0)
    assert credit.is_overdrawn(1)
    for _ in range(17):
        credit.settle(1, -1.0)  # a trial that was under way
    assert not credit.is_overdrawn(1)
