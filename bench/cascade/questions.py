"""Benchmark questions with a known answer, from the packaged task suite."""

from __future__ import annotations

from functools import partial

from ...classifier.grading.questions import Question


def pocket_questions(n: int, seed: int = 0) -> list[Question]:
    """Return `n` tasks of the held-out test split of the packaged suite."""
    from ...embedded import tasks

    return [
        Question(task.id, task.kind, task.prompt, task.answer, partial(tasks.check, task))
        for task in tasks.make_tasks("test", n, seed)
    ]
