"""Questions to be graded: those with a known answer, prompts and conversations, from a file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.decoding import convert, prepare_types
from ...protocol.errors import InvalidRequestError
from ...protocol.requests import Message
from ...protocol.unicode_forms import read_text
from ..features.gate_inputs import PromptView
from .agreement import agree

# "5-10" and "covid-19" hold no sign, and "1,2,3" is no thousand.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})++(?!,?\d)|\d++)(?:\.\d+)?")
_LINE_END = re.compile(r"\r?\n")


@dataclass(frozen=True, slots=True)
class Question:
    """A question whose answer is known."""

    id: str
    kind: str
    prompt: str
    # For a person to compare with.
    answer: str
    # Whether a reply is right.
    grade: Callable[[str], bool]


@dataclass(frozen=True)
class Prompt:
    """One user turn, or a conversation that ends in one. `grade` is None where nobody knows the answer."""

    id: str
    kind: str
    # The last user turn.
    prompt: str
    grade: Callable[[str], bool] | None = None
    # The whole conversation as it is sent; empty for a single turn.
    wire: tuple[dict[str, Any], ...] = ()

    @property
    def body(self) -> list[dict[str, Any]]:
        """The messages of a request."""
        return list(self.wire) or [{"role": "user", "content": self.prompt}]

    @cached_property
    def messages(self) -> list[Message]:
        """The same for an engine. Raises InvalidRequestError for what is no message of text."""
        return [convert(each, Message) for each in self.body]


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a task file."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    answer: str | int | float | None = None
    match: str = "agree"
    id: str | None = None
    kind: str = "file"


prepare_types(_Row)


def read_questions(path: Path) -> list[Question]:
    """Questions of a JSON Lines file: `{"prompt", "answer", "match": "agree" | "exact" | "contains" | "number"}`.

    Raises InvalidRequestError naming the line that is wrong.
    """
    rows = [(number, _row(path, number, line)) for number, line in _lines(path)]
    for number, row in rows:
        if row.prompt is None:
            raise InvalidRequestError(f"{path}, line {number}: a task is one prompt; conversations are for calibrate.")
    questions = [_question(path, number, row) for number, row in rows]
    if not questions:
        raise InvalidRequestError(f'{path} holds no tasks: one JSON object a line, {{"prompt": ..., "answer": ...}}.')
    return questions


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSON Lines file, as `read_questions` takes it; or of a .txt file, one a line.

    Answers are optional, and `messages` may stand for a prompt.
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
    grade = None if row.answer is None else _question(path, number, row).grade
    wire = tuple(row.messages or ())
    found = Prompt(row.id or f"{path.name}:{number}", row.kind, row.prompt or "", grade, wire)
    if not wire:
        return found
    try:
        messages = found.messages
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}, line {number}: messages: {error.message}") from error
    if messages[-1].role != "user" or not messages[-1].text.strip():
        raise InvalidRequestError(f"{path}, line {number}: messages must end in what the user says.")
    return replace(found, prompt=PromptView.of(messages).text)


def _row(path: Path, number: int, line: str) -> _Row:
    where = f"{path}, line {number}"
    try:
        row = msgspec.json.decode(line, type=_Row)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"{where}: {error}") from error
    if (row.prompt is None) == (row.messages is None):
        raise InvalidRequestError(f"{where}: give either prompt or messages.")
    if not (row.messages or (row.prompt or "").strip()):
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
    name = row.id or f"{path.name}:{number}"
    return Question(name, row.kind, row.prompt or "", answer, lambda text: match(text, answer))


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


MATCHES: dict[str, Callable[[str, str], bool]] = {
    "agree": agree,
    "exact": lambda text, answer: _folded(text) == _folded(answer),
    "contains": lambda text, answer: _folded(answer) in _folded(text),
    # Worked steps come before the result.
    "number": lambda text, answer: _last_number(text) == _last_number(answer),
}
