"""Checks of an answer's text against itself and the question: stated arithmetic, lists, copied words.

The checks do not depend on the kind of question. They ask what a careful reader would: is the stated sum true, is the
list ordered without repeats, does each number stand beside the same word as in the question, is the spelling right?
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log1p
from operator import eq

import numpy as np

from ...arrays import Array
from .parts import NUMBER, AnswerParts, parts_of, segments, words_of

_SPELLED = re.compile(r"(?<![\w])([A-Za-z])(?!\w)")
_MARKS = ("answer", "result", "therefore")
_MARK = re.compile(rf"\b(?:{'|'.join(_MARKS)})\b\W*", re.IGNORECASE)
_REFUSALS = ("i cannot", "i can't", "i do not know", "i don't know", "not sure", "unable to", "sorry")
REFUSAL = re.compile(rf"\b(?:{'|'.join(_REFUSALS)})\b", re.IGNORECASE)
_BRACKETS = ("()", "[]", "{}")
_NO_LETTER = re.compile(r"[^a-z]")
_LETTERS = {code: None for code in range(128) if _NO_LETTER.match(chr(code))}  # `str.translate` table: keeps a-z


@dataclass(frozen=True, slots=True)
class QuestionParts:
    """Parts of a question that an answer is compared with."""

    words: frozenset[str]
    # Words that begin with a letter.
    lettered: frozenset[str]
    # Numbers as written, in the order of the question.
    numbers: tuple[str, ...]
    # Number -> words that begin with a letter and share a segment (text between punctuation marks) with the number.
    beside: Mapping[str, frozenset[str]]
    # All ASCII letters of the question in order, without the characters between them.
    letters: str

    @classmethod
    def of(cls, question: str) -> QuestionParts:
        beside: dict[str, frozenset[str]] = {}
        for numbers, words in segments(question):
            lettered = _alphabetic_words(words)
            beside |= {number: lettered.union(beside.get(number, ())) for number in numbers}
        lower = question.lower()
        words = frozenset(words_of(lower))
        letters = lower.translate(_LETTERS) if lower.isascii() else _NO_LETTER.sub("", lower)
        return cls(words, _alphabetic_words(words), tuple(NUMBER.findall(question)), beside, letters)


def answer_checks(text: str, mentioned: QuestionParts, parts: AnswerParts | None = None) -> Array:
    """Return the answer features, (len(ANSWER_NAMES),) float32. `parts`: the result of `parts_of(text)`, if known."""
    return np.array([*map(float, _checks(text, mentioned, parts or parts_of(text)).values())], np.float32)


def _checks(text: str, mentioned: QuestionParts, parts: AnswerParts) -> dict[str, float]:
    lower = text.lower()
    words, numbers, items = parts.words, parts.numbers, parts.items
    truths = parts.sums + parts.comparisons
    false = truths.count(False)
    working, final, marked = _split_final(text, lower)
    final_words = words_of(final.lower())
    # Without a mark ("Answer:"), the last line is the final result, and all words before that line are the working.
    worked = words_of(working.lower()) if marked or not text.isascii() else words[: len(words) - len(final_words)]
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    opens_json = text.lstrip()[:1] in ("{", "[")
    valid_json = opens_json and _is_json(text)
    bound, misbound = _bindings(parts, mentioned)
    letters = _single_letters(working, worked)
    spelled = len(letters) > 2
    return {
        "answer_chars": log1p(len(text)),
        "answer_words": log1p(len(words)),
        "answer_empty": not text.strip(),
        "answer_lines": log1p(text.count("\n")),
        "answer_numbers": log1p(len(numbers)),
        "answer_new_numbers": _share_outside(numbers, mentioned.beside),
        "answer_missing_numbers": _share_outside(mentioned.numbers, set(numbers)),
        "answer_statements": log1p(len(truths)),
        "answer_false_statements": log1p(false),
        "answer_false_share": false / max(len(truths), 1),
        "answer_false_last": bool(truths) and not truths[-1],
        "answer_distinct_words": _distinct(words),
        "answer_distinct_trigrams": _distinct(trigrams),
        "answer_repeats": log1p(_longest_repeat(words)),
        "answer_copied_words": 1.0 - _share_outside(words, mentioned.words),
        "answer_final_chars": log1p(len(final)),
        "answer_final_words": log1p(len(final_words)),
        "answer_final_derived": 1.0 - _share_outside(final_words, set(worked)),
        "answer_final_in_prompt": 1.0 - _share_outside(final_words, mentioned.words),
        "answer_has_final": marked,
        "answer_unbalanced": sum(abs(text.count(a) - text.count(b)) for a, b in _BRACKETS) + text.count('"') % 2,
        "answer_json": valid_json,
        "answer_broken_json": opens_json and not valid_json,
        "answer_refusal": _may_match(_REFUSALS, lower) and REFUSAL.search(text) is not None,
        "answer_unusual": 0 if text.isascii() else sum(ord(c) > 127 for c in text) / len(text),
        "answer_list_items": log1p(len(items)),
        "answer_list_repeats": len(items) - len(set(items)),
        "answer_list_kinks": _kinks(items),
        "answer_bound": log1p(bound),
        "answer_misbound": log1p(misbound),
        "answer_misbound_share": misbound / max(bound + misbound, 1),
        "answer_spelled": spelled,
        "answer_misspelled": spelled and letters not in mentioned.letters,
    }


def _kinks(items: Sequence[str]) -> int:
    """Return how many neighbouring pairs in a list of numbers break the prevailing order; 0 for other lists."""
    if not all(NUMBER.fullmatch(item) for item in items):
        return 0
    numbers = [float(item) for item in items]
    up = sum(a < b for a, b in pairwise(numbers))
    down = sum(a > b for a, b in pairwise(numbers))
    return min(up, down)


def _bindings(parts: AnswerParts, mentioned: QuestionParts) -> tuple[int, int]:
    """Count the answer's numbers that stand beside the same word as in the question, and the numbers that do not.

    Numbers that are not in the question, or not beside any of the question's words, are in neither count.
    """
    bound = misbound = 0
    for numbers, words in parts.segments:
        for number in frozenset[str]() if words.isdisjoint(mentioned.lettered) else numbers & mentioned.beside.keys():
            if words.isdisjoint(mentioned.beside[number]):
                misbound += 1
            else:
                bound += 1
    return bound, misbound


def _alphabetic_words(words: Iterable[str]) -> frozenset[str]:
    return frozenset(word for word in words if word[0].isalpha())


def _single_letters(working: str, words: Sequence[str]) -> str:
    """Return the letters that the working spells one by one. `words`: the lower-case words of `working`."""
    if working.isascii():
        return "".join(word for word in words if len(word) == 1 and word.isalpha())
    return "".join(_SPELLED.findall(working)).lower()


def _split_final(text: str, lower: str) -> tuple[str, str, bool]:
    """Return the text before and after the last mark ("Answer:"), and True. Without a mark, split off the last line."""
    marks = list(_MARK.finditer(text)) if _may_match(_MARKS, lower) else []
    if marks:
        return text[: marks[-1].start()], text[marks[-1].end() :], True
    working, _, final = text.rstrip().rpartition("\n")
    return working, final, False


def _may_match(phrases: Sequence[str], lower: str) -> bool:
    """Return False if a case-insensitive search for `phrases` cannot match. This check avoids most searches."""
    return not lower.isascii() or any(phrase in lower for phrase in phrases)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _share_outside(items: Sequence[str], allowed: Container[str]) -> float:
    return (len(items) - sum(map(allowed.__contains__, items))) / max(len(items), 1)


def _distinct(items: Sequence[object]) -> float:
    return len(set(items)) / len(items) if items else 1.0


def _longest_repeat(words: Sequence[str]) -> int:
    """Return the length of the longest run of repetitions of one word."""
    repeats = bytes(map(eq, words, words[1:]))
    return max(map(len, repeats.split(b"\0")))


ANSWER_NAMES = (*_checks("", QuestionParts.of(""), parts_of("")),)
