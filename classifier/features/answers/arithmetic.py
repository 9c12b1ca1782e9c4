"""Checks of worked arithmetic: whether each stated step holds, and whether the answer follows from the steps.

Small models that reason aloud leave evidence of errors: a false equation, a number of unknown origin, a number of the
question that no step uses, a result that no later step uses, or an answer that no step reached. The parser reads plain
equations (`3 x $4 = $12`), chains (`8 + 6 = 14 = 14.0`) and calculator marks (`<<3*4=12>>`).
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, log1p
from typing import NamedTuple

import numpy as np

from ...arrays import Array

# This pattern starts with a character set, which the regex engine finds faster than a leading alternation.
_NUMBER = re.compile(r"[\d.](?:(?<=\d)[\d,]*(?:\.\d+)?|(?<=\.)\d+)")
_TOKEN = re.compile(r"\d+(?:\.\d+)?|\.\d+|[-+*/()%]")
_THOUSANDS = re.compile(r",(?<=\d,)(?=\d{3}\b)")
# Match only at the start of a run of blanks, because matching at every blank takes quadratic time on a long run.
_TIMES = re.compile(r"(?<=[\d)\s])(?<![\d)\s][ ])[ ]*+[xX×⋅·][ ]*+(?=[\d($])|\\times|\\cdot")
_MAY_BE_TIMES = re.compile(r"[xX×⋅·][ ]*+[\d($]|\\times|\\cdot")
_MARK = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")
_ASIDE = re.compile(r"\([^()\d]*\)")
_UNIT = re.compile(r" (?<=\d ) *[A-Za-z][A-Za-z'’]*(?: [A-Za-z'’]+){0,3}(?= *[-+*/=)])")
_BREAK = re.compile(r"[.,;:\n](?:(?<=\n)|\s)")
_EQUATION = re.compile(r"[-+*/()%$\d., ]{0,200}=[-+*/()=%$\d., ]{0,200}")
_RESULT = re.compile(r"####[ \t]*(.*)")
_SENTENCE = re.compile(r"[.?!](?:\s|$)")
_NUMBER_WORDS: dict[str, float] = {
    **{"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10},
    **{"dozen": 12, "half": 0.5, "quarter": 0.25, "third": 1 / 3, "twice": 2, "double": 2, "triple": 3, "week": 7},
}
_WORD = re.compile(r"[a-z]+")
_PHRASES = (
    *("however", "approximately", "round", "let's", "let x", "first", "therefore", "since", "because", "actually"),
    *("wait", "cannot", "can't", "not enough", "assume", "denote", "equation", "subtract", "per ", "in total"),
)
_OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "+": float.__add__,
    "-": float.__sub__,
    "*": float.__mul__,
    "/": float.__truediv__,
}
_ROUNDED, _EXACT = 5e-3, 1e-6
_MAX_STEPS = 200
_DEEPEST = 40


class ArithmeticStep(NamedTuple):
    """A stated equation, `left = right`."""

    # Numbers on the left side.
    operands: tuple[float, ...]
    # Values of the equation's left and right side.
    left: float
    right: float
    # Number of operators on the left side.
    operators: int


@dataclass(frozen=True, slots=True)
class StatedSteps:
    """Equations found in a text: `stated` in plain text, and `marked` by calculator marks (`<<3*4=12>>`)."""

    stated: list[ArithmeticStep]
    marked: list[ArithmeticStep]

    def __add__(self, other: StatedSteps) -> StatedSteps:
        return StatedSteps(self.stated + other.stated, self.marked + other.marked)

    @property
    def all(self) -> list[ArithmeticStep]:
        """The first 200 equations of both kinds, with the marked equations last."""
        return (self.stated + self.marked)[:_MAX_STEPS]


def find_steps(text: str) -> StatedSteps:
    """Return the equations in `text` that consist of numbers and operators only."""
    plain = _THOUSANDS.sub("", text.replace("÷", "/").replace("−", "-"))
    if _MAY_BE_TIMES.search(plain):
        plain = _TIMES.sub("*", plain)
    marked = _steps(_MARK.findall(plain))
    bare = _UNIT.sub("", _ASIDE.sub(" ", _MARK.sub(" ", plain)))
    equations = (piece for piece in _BREAK.split(bare) if "=" in piece)
    chains = (match.group().split("=") for piece in equations for match in _EQUATION.finditer(piece))
    return StatedSteps(_steps(pair for chain in chains for pair in pairwise(chain)), marked)


def final_number(text: str) -> tuple[float | None, bool]:
    """Return the number after the last `####`, else the last number of the answer, and whether there is a `####`."""
    marked = _RESULT.findall(text)
    numbers = _NUMBER.findall(marked[-1] if marked else text)
    if not numbers:
        return None, bool(marked)
    return _value(numbers[0] if marked else numbers[-1]), bool(marked)


@dataclass(frozen=True, slots=True)
class QuestionFacts:
    """Numbers and lengths of a question, which the steps of an answer are compared with."""

    # Numbers written in digits.
    numbers: tuple[float, ...]
    # Numbers written in words.
    worded: tuple[float, ...]
    # Length of the question, in characters.
    chars: int
    sentences: int

    @classmethod
    def of(cls, question: str) -> QuestionFacts:
        numbers = tuple(_value(number) for number in _NUMBER.findall(question))
        worded = tuple(_NUMBER_WORDS[word] for word in _WORD.findall(question.lower()) if word in _NUMBER_WORDS)
        return cls(numbers, worded, len(question), len(_SENTENCE.findall(question)))


def step_checks(question: QuestionFacts, answer: str, read: StatedSteps | None = None) -> Array:
    """Return the step features, (len(STEP_NAMES),) float32. `read`: the result of `find_steps(answer)`, if known."""
    return np.array([*_checks(question, answer, (read or find_steps(answer)).all).values()], np.float32)


def _checks(question: QuestionFacts, answer: str, steps: Sequence[ArithmeticStep]) -> dict[str, float]:
    final, marked = final_number(answer)
    lower = answer.lower()
    return {
        **_truth(steps),
        **_flow(steps, question.numbers, question.worded),
        **_final_features(steps, question.numbers, final),
        "marked": float(marked),
        "givens": len(question.numbers),
        "number_words": len(question.worded),
        "answer_ratio": log1p(len(answer) / max(question.chars, 1)),
        "sentences": log1p(question.sentences),
        "ends_as_sentence": float(answer.rstrip().endswith((".", "!"))),
        "tail": log1p(len(answer.strip().rpartition("####")[2])),
        **{f"answer_count_{ord(mark):02x}": log1p(answer.count(mark)) for mark in "+*/-%="},
        **{f"says_{phrase.strip().replace(' ', '_')}": float(phrase in lower) for phrase in _PHRASES},
    }


def _truth(steps: Sequence[ArithmeticStep]) -> dict[str, float]:
    """Return features on how many steps are true (exactly, and within rounding) and how many operators they have."""
    wrong = [not _is_close(step.left, step.right, _ROUNDED) for step in steps]
    inexact = sum(not _is_close(step.left, step.right, _EXACT) for step in steps)
    return {
        "steps": log1p(len(steps)),
        "false_steps": log1p(sum(wrong)),
        "false_step_share": sum(wrong) / max(len(steps), 1),
        "last_step_false": float(bool(wrong) and wrong[-1]),
        "inexact_steps": log1p(inexact),
        "operators": sum(step.operators for step in steps) / max(len(steps), 1),
        "most_operators": max((step.operators for step in steps), default=0),
    }


def _flow(steps: Sequence[ArithmeticStep], numbers: Sequence[float], worded: Sequence[float]) -> dict[str, float]:
    """Return features that count operands of unknown origin, unused numbers of the question, and unused results."""
    unknown = _unknown_operands(steps, {*numbers, *worded})
    operands = {operand for step in steps for operand in step.operands}
    used = operands | {100 * operand for operand in operands}  # steps may write 20 % as 0.2
    rising = sorted(used)
    never = {number for number in set(numbers) if number not in used and not _contains_near(number, rising, _EXACT)}
    unused = sum(number in never for number in numbers)
    dead = _dead_ends(steps)
    distinct = len({(step.operands, step.left) for step in steps if step.operators})
    results = [step.right for step in steps]
    return {
        "strangers": log1p(unknown),
        "stranger_share": unknown / max(sum(len(step.operands) for step in steps), 1),
        "unused_givens": unused,
        "unused_given_share": unused / max(len(numbers), 1),
        "dead_ends": log1p(dead),
        "dead_end_share": dead / max(len(steps), 1),
        "distinct_steps": distinct,
        "steps_over_givens": distinct - len(numbers),
        "steps_per_given": distinct / max(len(numbers) + len(worded), 1),
        "repeated_results": len(results) - len(set(results)),
        "whole_results": sum(map(_is_whole, results)) / len(results) if results else 1.0,
    }


def _unknown_operands(steps: Sequence[ArithmeticStep], numbers: set[float]) -> int:
    """Return the number of operands that are neither in `numbers` nor in an earlier step. Adds results to `numbers`."""
    unknown, rising = 0, sorted(numbers)
    for step in steps:
        for operand in step.operands:
            if operand not in numbers and not _contains_near(operand, rising, _ROUNDED):
                unknown += 1
        numbers.update((step.left, step.right))
        insort(rising, step.left)
        insort(rising, step.right)
    return unknown


def _dead_ends(steps: Sequence[ArithmeticStep]) -> int:
    """Return the number of results, except the last, that no later step uses."""
    dead = 0
    later: set[float] = set()
    rising: list[float] = []
    for earlier, step in pairwise(reversed(steps)):
        later.update(earlier.operands)
        for operand in earlier.operands:
            insort(rising, operand)
        if step.right not in later and not _contains_near(step.right, rising, _ROUNDED):
            dead += 1
    return dead


def _final_features(steps: Sequence[ArithmeticStep], numbers: Sequence[float], final: float | None) -> dict[str, float]:
    """Return features that compare the final number with the results of the steps and the question's numbers."""
    if final is None:
        return dict.fromkeys(_final_features((), (), 0.0), 0.0) | {"no_number": 1.0}
    results = [step.right for step in steps]
    size = log1p(abs(final))
    return {
        "no_number": 0.0,
        "final_whole": float(_is_whole(final)),
        "final_size": size,
        "final_over_givens": size - log1p(max(numbers, default=0.0)),
        "final_is_last": float(bool(results) and _is_close(results[-1], final, _ROUNDED)),
        "final_is_a_result": float(_contains_near(final, sorted(results), _ROUNDED)),
        "final_is_given": float(_contains_near(final, sorted(numbers), _EXACT)),
    }


def _steps(equations: Iterable[tuple[str, str]]) -> list[ArithmeticStep]:
    return [step for left, right in equations if (step := _step(left, right)) is not None]


def _step(left: str, right: str) -> ArithmeticStep | None:
    tokens = _TOKEN.findall(left)
    try:
        # Strip a trailing operator, which is punctuation before a word: `3 + 4 = 7 - so`.
        value, stated = _calculate(tokens), _calculate(_TOKEN.findall(right.rstrip(" .,+-*/(")))
    except _NotArithmeticError:
        return None
    operands = tuple([float(token) for token in tokens if token[-1].isdigit()])  # faster than a generator
    if not (isfinite(value) and isfinite(stated) and all(map(isfinite, operands))):
        return None
    return ArithmeticStep(operands, value, stated, sum(map("+-*/".count, tokens)))


class _NotArithmeticError(ValueError):
    pass


def _calculate(tokens: Sequence[str]) -> float:
    """Evaluate an expression of + - * / % and brackets. Raises _NotArithmeticError."""
    if tokens and tokens[0][-1].isdigit():  # fast path: most expressions are one number, or two with an operator
        if len(tokens) == 1:
            return float(tokens[0])
        if len(tokens) == 3 and tokens[1] in _OPERATIONS and tokens[2][-1].isdigit():
            return _calculate_pair(tokens[1], float(tokens[0]), float(tokens[2]))
    value, rest = _sum(tokens, 0)
    if rest != len(tokens):
        raise _NotArithmeticError
    return value


def _sum(tokens: Sequence[str], at: int, depth: int = 0) -> tuple[float, int]:
    value, at = _product(tokens, at, depth)
    while at < len(tokens) and tokens[at] in "+-":
        term, after = _product(tokens, at + 1, depth)
        value, at = _calculate_pair(tokens[at], value, term), after
    return value, at


def _product(tokens: Sequence[str], at: int, depth: int) -> tuple[float, int]:
    value, at = _atom(tokens, at, depth)
    while at < len(tokens) and tokens[at] in "*/(":
        bracket = tokens[at] == "("  # `3(4 + 5)` is a product too
        factor, after = _atom(tokens, at if bracket else at + 1, depth)
        value, at = _calculate_pair("/" if tokens[at] == "/" else "*", value, factor), after
    return value, at


def _calculate_pair(operator: str, one: float, other: float) -> float:
    if operator == "/" and other == 0:
        raise _NotArithmeticError
    return _OPERATIONS[operator](one, other)


def _atom(tokens: Sequence[str], at: int, depth: int) -> tuple[float, int]:
    if at >= len(tokens) or depth > _DEEPEST:
        raise _NotArithmeticError
    token = tokens[at]
    if token in "+-":
        value, at = _atom(tokens, at + 1, depth + 1)
        return (-value if token == "-" else value), at
    if token == "(":
        value, at = _sum(tokens, at + 1, depth + 1)
        if at >= len(tokens) or tokens[at] != ")":
            raise _NotArithmeticError
    elif token[-1].isdigit():
        value = float(token)
    else:
        raise _NotArithmeticError
    at += 1
    if at < len(tokens) and tokens[at] == "%":
        return value / 100, at + 1
    return value, at


def _value(number: str) -> float:
    return float(number.replace(",", "")[:300])


def _is_close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(1.0, abs(b))


def _contains_near(value: float, ordered: Sequence[float], tolerance: float) -> bool:
    """Return whether the sorted `ordered` contains `value` within the tolerance; compares the two nearest values."""
    at = bisect_left(ordered, value)
    return (at < len(ordered) and _is_close(value, ordered[at], tolerance)) or (
        at > 0 and _is_close(value, ordered[at - 1], tolerance)
    )


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) < 1e-9


STEP_NAMES = (*_checks(QuestionFacts.of(""), "", ()),)
