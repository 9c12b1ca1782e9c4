"""Grades two answers to one question against each other, where nobody knows the right one.

The cloud's answer stands for the truth unless it is none (empty, cut off, a refusal). The local answer counts as good
if it says the same: the same JSON, the same final number, the same few words, or in longer answers mostly the same
words; of answers that call tools, the same functions with the same arguments. Signs and operators count, and a negation
in the clause that says it (of answers of a sentence or two: anywhere) must stand in both.

What is right in other words, or wrong in both, is graded wrongly: this is the price of having no reference. Nor are
units looked at (5 km, 5 miles; a letter behind a number counts as one), the words around a number (5 May, 5 June), all
but the last of several numbers in prose (2 hours and 30 minutes), factorials, which brackets an interval has, numbers
in words, a choice that stays open ("A or B"), in long answers who does what to whom and negations, and such as are a
part of a word ("impossible") or of a language that is not listed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from ..features.answers.checks import REFUSAL
from .normalization import NormalizedAnswer

GRADING = (
    "agreement: the cloud's answer counts as right unless it is empty, cut off or a refusal; the local one if it agrees"
)
_SHORT, _BRIEF = 12, 30  # words: an answer that may stand inside another, and one of a sentence or two
_OVERLAP = 0.6


@dataclass(frozen=True, slots=True)
class ComparableAnswer:
    """One tier's answer."""

    text: str
    # As on the wire.
    finish_reason: str = "stop"
    # Name and arguments of each tool call, as they were written.
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def stands(self) -> bool:
        """Whether it is an answer at all."""
        has_text = bool(self.text.strip()) and REFUSAL.search(self.text) is None
        return (has_text or bool(self.calls)) and self.finish_reason != "length"


def grades(local: ComparableAnswer, cloud: ComparableAnswer) -> tuple[float, float]:
    """The scores of the local and of the cloud's answer, 0 or 1 each."""
    if not cloud.stands:
        return float(local.stands), 0.0
    if local.calls or cloud.calls:
        return float(local.stands and _same_calls(local.calls, cloud.calls)), 1.0
    return float(local.stands and agree(local.text, cloud.text)), 1.0


def is_free_text(local: ComparableAnswer, cloud: ComparableAnswer) -> bool:
    """Whether both say something in more than a few words, so that agreement could only count shared words."""
    if local.calls or cloud.calls or not (local.stands and cloud.stands):
        return False
    if None not in (_json(local.text), _json(cloud.text)):
        return False
    return all(NormalizedAnswer.of(each.text).length > _SHORT for each in (local, cloud))


def contradict(one: str, other: str) -> bool:
    """Whether two texts end in different numbers, or one of a sentence or two holds a negation and the other none."""
    both = NormalizedAnswer.of(one), NormalizedAnswer.of(other)
    first, second = both[0].result, both[1].result
    if first is not None and second is not None and not first.same(second):
        return True
    return min(each.length for each in both) <= _BRIEF and both[0].denies != both[1].denies


def agree(one: str, other: str) -> bool:
    """Whether two answers say the same. Symmetric."""
    structured = _json(one), _json(other)
    if None not in structured:
        return structured[0] == structured[1]
    both = NormalizedAnswer.of(one), NormalizedAnswer.of(other)
    if both[0].words == both[1].words:
        return bool(both[0].words) or one.split() == other.split()
    results = both[0].result, both[1].result
    if results[0] is not None and results[1] is not None:
        return results[0].same(results[1])
    short, long = sorted(both, key=lambda each: (len(each.words), each.length))
    if short.length <= _SHORT:
        return results == (None, None) and long.contains(short)
    if short.length <= _BRIEF and short.denies != long.denies:
        return False
    shared = sum((Counter(short.words) & Counter(long.words)).values())
    return 2 * shared / (len(short.words) + len(long.words)) >= _OVERLAP


def _same_calls(one: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]]) -> bool:
    """Whether both call the same, in any order."""
    left = [(name, _arguments(text)) for name, text in other]
    for name, text in one:
        if (call := (name, _arguments(text))) not in left:
            return False
        left.remove(call)
    return not left


def _arguments(text: str) -> Any:
    """Parsed, if they are JSON."""
    try:
        return _parsed(text or "{}")
    except (ValueError, RecursionError):
        return text


def _json(text: str) -> Any:
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return _parsed(text)
    except (ValueError, RecursionError):
        return None


def _parsed(text: str) -> Any:
    """To Python true is 1, so that each number is wrapped."""
    return json.loads(text, parse_int=_wrapped, parse_float=_wrapped)


def _wrapped(number: str) -> tuple[Decimal | str]:
    try:
        return (Decimal(number),)
    except InvalidOperation:  # its exponent is beyond all bounds
        return (number,)
