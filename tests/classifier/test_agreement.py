"""Grading two answers against each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.classifier.agreement import Said, agree, grades

LONG = "The mitochondrion turns sugar into energy that the cell can use, by way of many small steps."
OTHER = "Photosynthesis happens in the chloroplasts of plants, which catch light with a green dye."


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Paris", "It is **Paris**.", True),
        ("Paris", "It is Rome.", False),
        ("3 + 4 = 7, so 7.", "The total is 7", True),
        ("It makes 1,200 in all.", "1200", True),
        ("It makes 12.", "It makes 13.", False),
        ("5 apples", "many apples", False),
        ('{"a": 1, "b": [2]}', '{"b": [2], "a": 1}', True),
        ('{"a": 1}', '{"a": 2}', False),
        (LONG, LONG.replace("many small steps", "several small steps"), True),
        (LONG, OTHER, False),
        ("", "Paris", False),
    ],
)  # fmt: skip
def test_saying_the_same(one: str, other: str, same: bool) -> None:
    assert agree(one, other) is same


@given(st.text(max_size=80), st.text(max_size=80))
def test_it_is_symmetric_and_takes_any_text(one: str, other: str) -> None:
    assert agree(one, other) == agree(other, one)
    assert agree(one, one)


def test_an_answer_that_is_none_counts_against_its_tier() -> None:
    assert grades(Said("Paris"), Said("Paris")) == (1, 1)
    assert grades(Said("Rome"), Said("Paris")) == (0, 1)
    assert grades(Said("Paris"), Said("")) == (1, 0)
    assert grades(Said("Paris"), Said("I cannot help with that.")) == (1, 0)
    assert grades(Said("It is Paris and", "length"), Said("Paris")) == (0, 1)
    assert grades(Said(""), Said("")) == (0, 0)


CALLED = Said("", "tool_calls", (("add", '{"a": 1, "b": [2]}'), ("now", "")))


@pytest.mark.parametrize(
    ("local", "cloud", "graded"),
    [
        (CALLED, CALLED, (1, 1)),
        (Said("So I call:", "tool_calls", (("now", "{}"), ("add", '{"b":[2],"a":1}'))), CALLED, (1, 1)),
        (Said("", "tool_calls", (("add", '{"a": 1, "b": [3]}'), ("now", ""))), CALLED, (0, 1)),
        (Said("", "tool_calls", CALLED.calls[:1]), CALLED, (0, 1)),
        (Said("", "tool_calls", (*CALLED.calls, CALLED.calls[0])), CALLED, (0, 1)),
        (Said("It is 3."), CALLED, (0, 1)),
        (Said("add(1, [2])"), Said("add(1, [2])", "tool_calls", CALLED.calls), (0, 1)),
        (CALLED, Said("It is 3."), (0, 1)),
        (Said("", "tool_calls", (("now", "half {"),)), Said("", "tool_calls", (("now", "half {"),)), (1, 1)),
        (Said("", "length", CALLED.calls), CALLED, (0, 1)),
        (CALLED, Said("", "length", CALLED.calls), (1, 0)),
    ],
)
def test_answers_that_call_tools(local: Said, cloud: Said, graded: tuple[float, float]) -> None:
    assert grades(local, cloud) == graded
