"""Benchmark questions with a known answer, from the packaged task suite."""

from __future__ import annotations

from collections.abc import Callable

from ...classifier.grading.questions import Question


def pocket_questions(n: int, seed: int = 0) -> list[Question]:
    """Return `n` tasks of the held-out test split of the packaged suite."""
    from ...embedded import tasks

    def graded_by(task: tasks.Task) -> Callable[[str], bool]:
        return lambda text: tasks.check(task, text)

    return [
        Question(task.id, task.kind, task.prompt, task.answer, graded_by(task))
        for task in tasks.make_tasks("test", n, seed)
    ]
