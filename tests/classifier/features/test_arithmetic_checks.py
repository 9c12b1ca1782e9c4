"""Worked arithmetic: what is read, what is features_of false, and that hostile text costs nothing."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.classifier.features.answers.arithmetic import (
    STEP_NAMES,
    QuestionFacts,
    final_number,
    find_steps,
    step_checks,
)


def features_of(question: str, answer: str) -> dict[str, float]:
    return dict(zip(STEP_NAMES, step_checks(QuestionFacts.of(question), answer).tolist(), strict=True))


@pytest.mark.parametrize(
    ("text", "left", "right"),
    [
        ("3 x $4 = $12.", 12, 12),
        ("<<3*4=13>>13", 12, 13),
        ("2,000 / 4 = 500", 500, 500),
        ("160 - 20 (straws for rabbits) = 140 straws", 140, 140),
        ("2 apples + 3 apples = 5 apples", 5, 5),
        ("(5 + 1) × 2 = 12", 12, 12),
        ("50% * 8 = 4", 4, 4),
        ("-3 + 5 = 2", 2, 2),
    ],
)
def test_a_step_is_read(text: str, left: float, right: float) -> None:
    step = find_steps(text).all[0]
    assert (step.left, step.right) == pytest.approx((left, right))


@pytest.mark.parametrize("text", ["", "x = 3", "1/0 = 3", "so = 4", "= 5", "((3 = 3", f"<<{'9' * 400}=2>>"])
def test_text_without_arithmetic_is_skipped(text: str) -> None:
    assert find_steps(text).all == []


def test_a_chain_is_every_pair() -> None:
    assert [(s.left, s.right) for s in find_steps("8 + 6 = 14 = 15").all] == [(14.0, 14.0), (14.0, 15.0)]


def test_evidence() -> None:
    question = "Ann has 3 boxes of 4 pens and 5 loose ones. How many?"
    good = features_of(question, "3 * 4 = 12\n12 + 5 = 17\n#### 17")
    assert good["false_steps"] == good["strangers"] == good["unused_givens"] == good["dead_ends"] == 0
    assert good["final_is_last"] == good["marked"] == 1
    assert features_of(question, "3 * 4 = 13\n13 + 5 = 18\n#### 18")["false_steps"] > 0
    assert features_of(question, "3 * 4 = 12\n#### 12")["unused_givens"] == 1
    assert features_of(question, "3 * 7 = 21\n#### 21")["strangers"] > 0
    assert features_of(question, "3 * 4 = 12\n3 + 5 = 8\n#### 8")["dead_ends"] > 0
    assert features_of(question, "3 * 4 = 12\n12 + 5 = 17\n#### 16")["final_is_last"] == 0
    assert features_of(question, "Nobody knows.")["no_number"] == 1


def test_the_final_number() -> None:
    assert final_number("so 3 and\n#### $1,200.5") == (1200.5, True)
    assert final_number("it is 3 or 4.") == (4.0, False)
    assert final_number("") == (None, False)


@given(st.text(alphabet="0123456789+-*/()=%$., x\n<>#a", max_size=300))
def test_any_text_gives_finite_numbers(text: str) -> None:
    checks = step_checks(QuestionFacts.of(text), text)
    assert checks.shape == (len(STEP_NAMES),)
    assert np.isfinite(checks).all()


@pytest.mark.parametrize(
    "text", ["(" * 20_000 + "1=1", "1+" * 20_000 + "=3", "1 a" * 20_000, "=3 " * 20_000, "-" * 20_000 + "1=1"]
)
def test_hostile_text_is_quick(text: str) -> None:
    started = time.process_time()
    step_checks(QuestionFacts.of("2 and 3"), text)
    assert time.process_time() - started < 2.0
