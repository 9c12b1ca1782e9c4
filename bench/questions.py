"""What the measurements ask: questions with a known answer, from the packaged task suite or from a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..classifier.grading.agreement import agree
from ..protocol.errors import InvalidRequestError
from ..protocol.unicode_forms import read_text

# "5-10" and "covid-19" hold no sign, and "1,2,3" is no thousand.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})++(?!,?\d)|\d++)(?:\.\d+)?")
_LINE_END = re.compile(r"\r?\n")


@dataclass(frozen=True, slots=True)
class Question:
    """`grade` says whether a reply is right; `answer` is what a person would compare it with."""

    id: str
    kind: str
    prompt: str
    answer: str
    grade: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question whose answer nobody may know: `grade` is None then."""

    id: str
    kind: str
    prompt: str
    grade: Callable[[str], bool] | None = None


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a task file."""

    prompt: str
    answer: str | int | float | None = None
    match: str = "agree"
    id: str | None = None
    kind: str = "file"


def pocket_questions(n: int, seed: int = 0) -> list[Question]:
    """`n` tasks of the held-out test split of the packaged suite."""
    from ..embedded import tasks

    def graded_by(task: tasks.Task) -> Callable[[str], bool]:
        return lambda text: tasks.check(task, text)

    return [
        Question(task.id, task.kind, task.prompt, task.answer, graded_by(task))
        for task in tasks.make_tasks("test", n, seed)
    ]


def read_questions(path: Path) -> list[Question]:
    """Questions of a JSON Lines file: `{"prompt", "answer", "match": "agree" | "exact" | "contains" | "number"}`.

    Raises InvalidRequestError naming the line that is wrong.
    """
    questions = [_question(path, number, _row(path, number, line)) for number, line in _lines(path)]
    if not questions:
        raise InvalidRequestError(f'{path} holds no tasks: one JSON object a line, {{"prompt": ..., "answer": ...}}.')
    return questions


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSON Lines file as `read_questions` takes it, answers optional; or of a .txt file, one a line.

    Raises InvalidRequestError naming the line that is wrong.
    """
    if path.suffix == ".txt":
        return [Prompt(f"{path.name}:{number}", "file", line.strip()) for number, line in _lines(path)]
    return [_prompt(path, number, line) for number, line in _lines(path)]


def _lines(path: Path) -> list[tuple[int, str]]:
    """Those that hold something, with their numbers. Only a line feed ends one: a prompt may hold U+2028 or a form
    feed, at which `str.splitlines` would cut it in two.
    """
    try:
        text = read_text(path, InvalidRequestError)
    except OSError as error:
        raise InvalidRequestError(f"Cannot read {path}: {error}") from error
    return [(number, line) for number, line in enumerate(_LINE_END.split(text), 1) if line.strip()]


def _prompt(path: Path, number: int, line: str) -> Prompt:
    row = _row(path, number, line)
    if row.answer is None:
        return Prompt(row.id or f"{path.name}:{number}", row.kind, row.prompt)
    question = _question(path, number, row)
    return Prompt(question.id, question.kind, question.prompt, question.grade)


def _row(path: Path, number: int, line: str) -> _Row:
    where = f"{path}, line {number}"
    try:
        row = msgspec.json.decode(line, type=_Row)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"{where}: {error}") from error
    if not row.prompt.strip():
        raise InvalidRequestError(f"{where}: the prompt is empty.")
    if row.match not in MATCHES:
        raise InvalidRequestError(f"{where}: match must be one of {', '.join(MATCHES)}, got {row.match!r}.")
    return row


def _question(path: Path, number: int, row: _Row) -> Question:
    if row.answer is None or not str(row.answer).strip():
        raise InvalidRequestError(
            f"{path}, line {number}: the answer is {'missing' if row.answer is None else 'empty'}."
        )
    answer = str(row.answer)
    if row.match == "number" and _last_number(answer) is None:
        raise InvalidRequestError(f"{path}, line {number}: match is number, but the answer {answer!r} holds none.")
    match = MATCHES[row.match]
    return Question(row.id or f"{path.name}:{number}", row.kind, row.prompt, answer, lambda text: match(text, answer))


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")


def _exact(text: str, answer: str) -> bool:
    return _folded(text) == _folded(answer)


def _contains(text: str, answer: str) -> bool:
    return _folded(answer) in _folded(text)


def _number(text: str, answer: str) -> bool:
    """The last number of the reply counts: worked steps come before the result."""
    return _last_number(text) == _last_number(answer)


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


MATCHES: dict[str, Callable[[str, str], bool]] = {
    "agree": agree,
    "exact": _exact,
    "contains": _contains,
    "number": _number,
}
