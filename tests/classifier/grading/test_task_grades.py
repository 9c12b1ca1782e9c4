"""Grades of sampled requests: fields of JSON, calls, short answers, and no grade for free text."""

from __future__ import annotations

import pytest
from updraft.classifier.grading.agreement import ComparableAnswer
from updraft.classifier.grading.task_grades import TaskScores, graded

LONG = "This is a long answer in prose that says several things about the weather of the coming week in the north."


@pytest.mark.parametrize(
    ("local", "cloud", "scores"),
    [
        ('{"a": 1, "b": "x"}', '{"b": "x", "a": 1.0}', TaskScores(1.0, 1.0, "fields")),
        ('{"a": 1, "b": "y"}', '{"a": 1, "b": "x"}', TaskScores(0.5, 1.0, "fields")),
        ('{"a": {"b": 1, "c": 2}}', '{"a": {"b": 1, "c": 3}, "d": [1]}', TaskScores(1 / 3, 1.0, "fields")),
        ('{"a": true}', '{"a": 1}', TaskScores(0.0, 1.0, "fields")),
        ("{}", "{}", TaskScores(1.0, 1.0, "fields")),
        ("[1, 2]", "[2, 1]", TaskScores(0.0, 1.0, "fields")),
        ('{"a": ', '{"a": 1}', TaskScores(0.0, 1.0, "agreement")),
        ("Paris", "paris.", TaskScores(1.0, 1.0, "agreement")),
        ("Rome", "Paris", TaskScores(0.0, 1.0, "agreement")),
        ("Paris", "", TaskScores(None, None, "")),
        ("Paris", "I'm sorry, but I cannot help with that.", TaskScores(None, None, "")),
        (LONG, "", TaskScores(None, None, "")),
        (LONG, LONG.replace("north", "south"), TaskScores(None, None, "")),
    ],
)
def test_grades(local: str, cloud: str, scores: TaskScores) -> None:
    assert graded(ComparableAnswer(local), ComparableAnswer(cloud)) == scores


def test_calls_are_compared_as_calls() -> None:
    call, other = (("add", '{"a": 1}'),), (("add", '{"a": 2}'),)
    assert graded(ComparableAnswer("", calls=call), ComparableAnswer("", calls=call)).local == 1
    assert graded(ComparableAnswer("", calls=other), ComparableAnswer("", calls=call)).local == 0
