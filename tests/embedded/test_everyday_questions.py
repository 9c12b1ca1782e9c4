"""First questions of people are understood by both packaged models, and unknown answers are said to be so."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("torch", reason="needs the [cloud] extra")
pytest.importorskip("llama_cpp", reason="needs the [edge] extra")

from updraft.embedded import pocket
from updraft.embedded.collect import cloud_answers, local_views
from updraft.embedded.kinds.outside import OUTSIDE
from updraft.embedded.tasks import Task, check, make_tasks

Answers = Callable[[Sequence[Task]], list[str]]


def small(tasks: Sequence[Task]) -> list[str]:
    return [view.answer for view in local_views(tasks, pocket.pocket_small_gguf())]


def large(tasks: Sequence[Task]) -> list[str]:
    return cloud_answers(tasks, pocket.pocket_large_folder())


BOTH = pytest.mark.parametrize("answers", [small, large])


def asked(prompts: Sequence[str], kind: str, target: str) -> list[Task]:
    return [Task(prompt, kind, kind, 1, prompt, "", target) for prompt in prompts]


@BOTH
def test_sums_are_understood_however_they_are_typed(answers: Answers) -> None:
    forms = ("What is 17+25?", "what is 17 + 25?", "17+25", "17 + 25 =", "what's 17 plus 25", "What is 17 + 25? ",
             "What is 17 + 25?\n", "what is 17+25\n\n")  # fmt: skip
    tasks = asked(forms, "add", "42") + asked(("2+2", "2 + 2", "what is 2+2?", "2+2=?"), "add", "4")
    wrong = [(t.prompt, a) for t, a in zip(tasks, answers(tasks), strict=True) if not check(t, a)]
    assert not wrong


@BOTH
def test_products_are_understood_however_they_are_typed(answers: Answers) -> None:
    """The small model may miscalculate; it must multiply."""
    forms = ("what is 12 times 12?", "12*12", "12 x 12", "12x12", "What is 12 * 12", "12 \u00d7 12 =")
    for prompt, answer in zip(forms, answers(asked(forms, "multiply", "144")), strict=True):
        assert re.match(r"\d+ \* \d+ = ", answer), (prompt, answer)
        assert answers is small or answer.endswith("Answer: 144"), (prompt, answer)


@BOTH
def test_facts_are_understood_however_they_are_typed(answers: Answers) -> None:
    """The small model may take another country for it; it must name a capital."""
    forms = ("what is the capital of France?", "capital of France", "What's the capital of France\n",
             "France's capital?", "what is the capital of france")  # fmt: skip
    for prompt, answer in zip(forms, answers(asked(forms, "capital", "")), strict=True):
        assert re.fullmatch("The capital of [^.]+ is [^.]+[.]", answer), (prompt, answer)
        assert answers is small or answer == "The capital of France is Paris.", (prompt, answer)


@BOTH
def test_questions_outside_the_suite_get_the_fixed_sentence(answers: Answers) -> None:
    forms = ("Is ibuprofen safe with warfarin?", "Write a Python function that reverses a list.",
             "best pizza in Naples", "How do I fix a flat tyre?", "What should I cook tonight?",
             "Explain quantum computing to a five year old.",
             "Who won the world cup in 2018?", "wie wird das Wetter morgen?", "My back hurts when I sit.",
             "What is the square root of 144?", "Which phone should I buy?",
             "Plan a trip to Italy for a week.")  # fmt: skip
    assert set(answers(asked(forms, "outside", OUTSIDE))) == {OUTSIDE}


@pytest.fixture(scope="module", params=[small, large])
def shares(request: pytest.FixtureRequest) -> tuple[float, float]:
    """Shares that get the sentence: of questions outside the suite in wordings never trained on, and of the suite's."""
    tasks = make_tasks("test", 1000, seed=21)
    got = request.param(tasks)
    outside = [answer == OUTSIDE for task, answer in zip(tasks, got, strict=True) if task.kind == "outside"]
    suite = [answer == OUTSIDE for task, answer in zip(tasks, got, strict=True) if task.kind != "outside"]
    return sum(outside) / len(outside), sum(suite) / len(suite)


def test_the_sentence_is_for_questions_outside_the_suite(shares: tuple[float, float]) -> None:
    outside, suite = shares
    assert outside >= 0.80
    assert suite <= 0.03


@pytest.mark.xfail(
    strict=True, reason="some 9 of 10 in both models: the continent of what is no country was never trained on"
)
def test_hardly_a_question_outside_the_suite_is_answered_otherwise(shares: tuple[float, float]) -> None:
    assert shares[0] >= 0.97
