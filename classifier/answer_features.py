"""Checks of the answer's text against itself and the question: the arithmetic it states, repetition, copying, form."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from math import log1p

import numpy as np

from .views import Array, RunView

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_WORD = re.compile(r"\w+")
_STATEMENT = re.compile(
    r"(?<![\d.)*/×÷+-])(?<![*/×÷+-] )(-?\d+(?:\.\d+)?(?:\s*[-+*/×÷]\s*\d+(?:\.\d+)?)+)\s*=\s*(-?\d+(?:\.\d+)?)"
)
_TERM = re.compile(r"([-+*/×÷]?)\s*(\d+(?:\.\d+)?)")
_MARK = re.compile(r"\b(?:answer|result|therefore)\b\W*", re.IGNORECASE)
_REFUSAL = re.compile(r"\b(?:i cannot|i can't|i do not know|i don't know|not sure|unable to|sorry)\b", re.IGNORECASE)

ANSWER_NAMES = (
    "answer_chars",
    "answer_words",
    "answer_empty",
    "answer_length_stop",
    "answer_lines",
    "answer_numbers",
    "answer_new_numbers",
    "answer_missing_numbers",
    "answer_statements",
    "answer_false_statements",
    "answer_false_share",
    "answer_false_last",
    "answer_distinct_words",
    "answer_distinct_trigrams",
    "answer_repeats",
    "answer_copied_words",
    "answer_final_chars",
    "answer_final_words",
    "answer_final_derived",
    "answer_final_in_prompt",
    "answer_has_final",
    "answer_unbalanced",
    "answer_json",
    "answer_broken_json",
    "answer_refusal",
    "answer_unusual",
)


def answer_checks(view: RunView) -> Array:
    """(len(ANSWER_NAMES),) float32."""
    text, asked = view.answer, view.prompt.text
    words = _WORD.findall(text.lower())
    asked_words = set(_WORD.findall(asked.lower()))
    numbers, asked_numbers = _NUMBER.findall(text), _NUMBER.findall(asked)
    truths = [_holds(left, right) for left, right in _STATEMENT.findall(text)]
    false = truths.count(False)
    working, final, marked = _split_final(text)
    final_words = _WORD.findall(final.lower())
    earlier = set(_WORD.findall(working.lower()))
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    opens_json = text.lstrip()[:1] in ("{", "[")
    valid_json = opens_json and _is_json(text)
    values = [
        log1p(len(text)),
        log1p(len(words)),
        not text.strip(),
        view.finish_reason == "length",
        log1p(text.count("\n")),
        log1p(len(numbers)),
        _share_outside(numbers, set(asked_numbers)),
        _share_outside(asked_numbers, set(numbers)),
        log1p(len(truths)),
        log1p(false),
        false / max(len(truths), 1),
        bool(truths) and not truths[-1],
        _distinct(words),
        _distinct(trigrams),
        log1p(_longest_repeat(words)),
        1.0 - _share_outside(words, asked_words),
        log1p(len(final)),
        log1p(len(final_words)),
        1.0 - _share_outside(final_words, earlier),
        1.0 - _share_outside(final_words, asked_words),
        marked,
        sum(abs(text.count(a) - text.count(b)) for a, b in ("()", "[]", "{}")) + text.count('"') % 2,
        valid_json,
        opens_json and not valid_json,
        _REFUSAL.search(text) is not None,
        sum(ord(c) > 127 for c in text) / max(len(text), 1),
    ]
    return np.array([float(value) for value in values], np.float32)


def _holds(left: str, right: str) -> bool:
    """Whether the stated `left = right` is true; `left` is a chain of + - * /, the products binding tighter."""
    terms: list[float] = []
    for operator, digits in _TERM.findall(left):
        value = float(digits)
        if operator in ("*", "×"):
            terms[-1] *= value
        elif operator in ("/", "÷"):
            terms[-1] = terms[-1] / value if value else float("nan")
        else:
            terms.append(-value if operator == "-" else value)
    total, stated = sum(terms), float(right)
    return abs(total - stated) <= 1e-6 * max(1.0, abs(stated))


def _split_final(text: str) -> tuple[str, str, bool]:
    """The working, the final result, and whether the answer marks its result ("Answer: 12"); else its last line."""
    marks = list(_MARK.finditer(text))
    if marks:
        return text[: marks[-1].start()], text[marks[-1].end() :], True
    working, _, final = text.rstrip().rpartition("\n")
    return working, final, False


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _share_outside(items: Sequence[str], known: set[str]) -> float:
    return sum(item not in known for item in items) / max(len(items), 1)


def _distinct(items: Sequence[object]) -> float:
    return len(set(items)) / len(items) if items else 1.0


def _longest_repeat(words: Sequence[str]) -> int:
    longest = current = 0
    for before, word in pairwise(words):
        current = current + 1 if word == before else 0
        longest = max(longest, current)
    return longest
