"""Files of questions to grade: prompts and conversations, with or without a known answer."""

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
from ...protocol.validation_messages import plain_words
from ..features.gate_inputs import PromptView
from .agreement import agree

# The hyphen in "5-10" or "covid-19" is no minus sign, and the commas in "1,2,3" are no thousands separators.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})++(?!,?\d)|\d++)(?:\.\d+)?")
_LINE_END = re.compile(r"\r?\n")


@dataclass(frozen=True, slots=True)
class Question:
    """A question with a known answer."""

    id: str
    kind: str
    prompt: str
    # Expected answer, as text for people.
    answer: str
    # Returns whether a reply is right.
    grade: Callable[[str], bool]


@dataclass(frozen=True)
class Prompt:
    """One user turn, or a conversation that ends with one. `grade` is None without a known answer."""

    id: str
    kind: str
    # Last user turn.
    prompt: str
    grade: Callable[[str], bool] | None = None
    # Whole conversation as sent to a server; empty for a single turn.
    wire: tuple[dict[str, Any], ...] = ()

    @property
    def body(self) -> list[dict[str, Any]]:
        """Messages of the request."""
        return list(self.wire) or [{"role": "user", "content": self.prompt}]

    @cached_property
    def messages(self) -> list[Message]:
        """Messages of the request, decoded for an engine. Raises InvalidRequestError if a message is not valid text."""
        return [convert(message, Message) for message in self.body]


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a question file."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    answer: str | int | float | None = None
    match: str = "agree"
    id: str | None = None
    kind: str = "file"


prepare_types(_Row)


def read_questions(path: Path) -> list[Question]:
    """Read a JSON Lines file: `{"prompt", "answer", "match": "agree" | "exact" | "contains" | "number"}` on each line.

    Raises InvalidRequestError with the number of an invalid line.
    """
    rows = [(number, _row(path, number, line)) for number, line in _lines(path)]
    for number, row in rows:
        if row.prompt is None:
            raise InvalidRequestError(f"{path}, line {number}: give a prompt; only `updraft calibrate` takes messages.")
    questions = [_question(path, number, row) for number, row in rows]
    if not questions:
        raise InvalidRequestError(f'{path} holds no tasks: add one per line, such as {{"prompt": ..., "answer": ...}}.')
    return questions


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts from a JSON Lines file in the format of `read_questions`, or from a .txt file with one per line.

    Answers are optional, and `messages` may replace `prompt`. Raises InvalidRequestError with the line number.
    """
    if path.suffix == ".txt":
        return [Prompt(f"{path.name}:{number}", "file", line.strip()) for number, line in _lines(path)]
    return [_prompt(path, number, line) for number, line in _lines(path)]


def _lines(path: Path) -> list[tuple[int, str]]:
    """Return the non-blank lines with numbers. Unlike `str.splitlines`, cuts no prompt at U+2028 or form feeds."""
    try:
        text = read_text(path, InvalidRequestError)
    except OSError as error:
        raise InvalidRequestError(f"Cannot read {path}: {error}") from error
    return [(number, line) for number, line in enumerate(_LINE_END.split(text), 1) if line.strip()]


def _prompt(path: Path, number: int, line: str) -> Prompt:
    row = _row(path, number, line)
    grade = None if row.answer is None else _question(path, number, row).grade
    wire = tuple(row.messages or ())
    prompt = Prompt(row.id or f"{path.name}:{number}", row.kind, row.prompt or "", grade, wire)
    if not wire:
        return prompt
    try:
        messages = prompt.messages
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}, line {number}: messages: {error.message}") from error
    if messages[-1].role != "user" or not messages[-1].text.strip():
        raise InvalidRequestError(f"{path}, line {number}: messages must end with a user's text.")
    return replace(prompt, prompt=PromptView.of(messages).text)


def _row(path: Path, number: int, line: str) -> _Row:
    where = f"{path}, line {number}"
    try:
        row = msgspec.json.decode(line, type=_Row)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"{where}: {plain_words(error)}") from error
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
        raise InvalidRequestError(f"{path}, line {number}: match is number, but {answer!r} contains no number.")
    match = MATCHES[row.match]
    name = row.id or f"{path.name}:{number}"
    return Question(name, row.kind, row.prompt or "", answer, lambda text: match(text, answer))


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


MATCHES: dict[str, Callable[[str, str], bool]] = {
    "agree": agree,
    "exact": lambda text, answer: _folded(text) == _folded(answer),
    "contains": lambda text, answer: _folded(answer) in _folded(text),
    # Working steps precede the result, so the last number counts.
    "number": lambda text, answer: _last_number(text) == _last_number(answer),
}
