"""Grades of sampled requests by the nature of the cloud's answer: fields of JSON, tool calls, or short answers.

Free text is not graded: two right answers share too few words, and two wrong ones too many, to prove anything. Nor is
an answer that the cloud refused or cut off, since nobody knows a better one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from .agreement import ComparableAnswer, grades, is_free_text, parsed_json


@dataclass(frozen=True, slots=True)
class TaskScores:
    """Scores of the local and the cloud's answer, from 0 to 1; None if no grader can tell."""

    local: float | None
    cloud: float | None
    # `fields`, `agreement`, or an empty string without a grade.
    grader: str


def graded(local: ComparableAnswer, cloud: ComparableAnswer) -> TaskScores:
    """Grade two answers to one request. The cloud's answer counts as right if it is usable (see `agreement`)."""
    if not cloud.stands or is_free_text(local, cloud):
        return TaskScores(None, None, "")
    answers = parsed_json(local.text), parsed_json(cloud.text)
    if not (local.calls or cloud.calls) and None not in answers and local.stands:
        return TaskScores(_equal_share(*answers), 1.0, "fields")
    return TaskScores(*grades(local, cloud), "agreement")


def _equal_share(one: Any, other: Any) -> float:
    """Return the share of equal fields among all fields of two JSON values."""
    fields = dict(_fields(one)), dict(_fields(other))
    paths = fields[0].keys() | fields[1].keys()
    missing = object()
    return sum(fields[0].get(path, missing) == fields[1].get(path, missing) for path in paths) / len(paths)


def _fields(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield each value inside a JSON value that is no object, with its path. Lists count as one value."""
    if isinstance(value, dict) and value:
        for name, inner in cast("dict[str, Any]", value).items():
            yield from _fields(inner, (*path, name))
    else:
        yield path, value
