"""300 questions with checkable answers, from easy to hard: `questions.tsv` and generated arithmetic."""

from __future__ import annotations

import random
from pathlib import Path

from ...classifier.grading.questions import MATCHES, Question

_ARITHMETIC = 40
_WORD, _NUMBER, _YES_OR_NO = "Answer in one word.", "Answer with the number only.", "Answer yes or no."


def written_questions() -> list[Question]:
    """Return all questions, always in the same order."""
    lines = Path(__file__).with_name("questions.tsv").read_text(encoding="utf-8").splitlines()
    rows = [tuple(line.split("\t")) for line in lines]
    questions = [_question(number, *row) for number, row in enumerate([*rows, *_arithmetic()], 1)]
    random.Random(0).shuffle(questions)  # so that any prefix has questions of all kinds
    return questions


def _question(number: int, kind: str, text: str, answer: str) -> Question:
    form, match = _WORD, "contains"
    if answer.isdigit():
        form, match = _NUMBER, "number"
    elif answer in ("yes", "no"):
        form, match = _YES_OR_NO, "agree"
    elif len(answer) < 3:  # a short answer would also match inside other words
        match = "agree"
    compare = MATCHES[match]
    return Question(f"q{number}", kind, f"{text} {form}", answer, lambda reply: compare(reply, answer))


def _arithmetic() -> list[tuple[str, str, str]]:
    """Return sums, differences, products and quotients of numbers with one to three digits."""
    draw = random.Random(0).randint
    questions: list[tuple[str, str, str]] = []
    for level in range(_ARITHMETIC // 4):
        most = (9, 9, 20, 20, 50, 50, 99, 99, 500, 999)[level]
        a, b, small = draw(2, most), draw(2, most), draw(2, 9)
        sums = ((f"{a} + {b}", a + b), (f"{a + b} - {b}", a), (f"{a} * {small}", a * small))
        for text, answer in (*sums, (f"{a * small} / {small}", a)):
            questions.append(("arithmetic", f"What is {text}?", str(answer)))
    return questions
