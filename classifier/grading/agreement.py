"""Grading of two answers to one question without a reference answer.

The cloud's answer counts as right unless it is empty, cut off or a refusal. The local answer counts as right if it says
the same: the same JSON, the same final number, the same few words, or in longer answers mostly the same words. Tool
calls must name the same functions with the same arguments. Signs and operators count. A negation in one answer must
also occur in the other, in the matching clause (in answers of one or two sentences: anywhere).

Without a reference, two errors are unavoidable: a right local answer in other words counts as wrong, and a mistake in
both answers counts as right. The grading ignores units (5 km, 5 miles; a letter after a number is read as a unit),
words around a number (5 May, 5 June), all but the last of several numbers in prose (2 hours and 30 minutes),
factorials, the kind of brackets of an interval, numbers in words, and undecided answers ("A or B"). In long answers it
also ignores negations, subjects and objects. It misses negations inside words ("impossible") or in unlisted languages.
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
# Maximum number of words of a short answer, which agrees if the other answer contains it, and of one or two sentences.
_SHORT, _BRIEF = 12, 30
_OVERLAP = 0.6


@dataclass(frozen=True, slots=True)
class ComparableAnswer:
    """One tier's answer, ready to compare."""

    text: str
    # Finish reason in OpenAI's words, such as "length".
    finish_reason: str = "stop"
    # Name and arguments of each tool call, as written by the model.
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def stands(self) -> bool:
        """Return whether the answer is usable: not empty, cut off or a refusal."""
        has_text = bool(self.text.strip()) and REFUSAL.search(self.text) is None
        return (has_text or bool(self.calls)) and self.finish_reason != "length"


def grades(local: ComparableAnswer, cloud: ComparableAnswer) -> tuple[float, float]:
    """Return the scores of the local and the cloud's answer, 0 or 1 each."""
    if not cloud.stands:
        return float(local.stands), 0.0
    if local.calls or cloud.calls:
        return float(local.stands and _same_calls(local.calls, cloud.calls)), 1.0
    return float(local.stands and agree(local.text, cloud.text)), 1.0


def is_free_text(local: ComparableAnswer, cloud: ComparableAnswer) -> bool:
    """Return whether both answers are longer than a few words, so that `agree` could only count shared words."""
    if local.calls or cloud.calls or not (local.stands and cloud.stands):
        return False
    if None not in (parsed_json(local.text), parsed_json(cloud.text)):
        return False
    return all(NormalizedAnswer.of(answer.text).length > _SHORT for answer in (local, cloud))


def contradict(one: str, other: str) -> bool:
    """Return whether two texts end in different numbers, or only one has a negation (checked if either is short)."""
    both = NormalizedAnswer.of(one), NormalizedAnswer.of(other)
    first, second = both[0].result, both[1].result
    if first is not None and second is not None and not first.same(second):
        return True
    return min(answer.length for answer in both) <= _BRIEF and both[0].denies != both[1].denies


def agree(one: str, other: str) -> bool:
    """Return whether two answers say the same. Symmetric."""
    structured = parsed_json(one), parsed_json(other)
    if None not in structured:
        return structured[0] == structured[1]
    both = NormalizedAnswer.of(one), NormalizedAnswer.of(other)
    if both[0].words == both[1].words:
        return bool(both[0].words) or one.split() == other.split()
    results = both[0].result, both[1].result
    if results[0] is not None and results[1] is not None:
        return results[0].same(results[1])
    short, long = sorted(both, key=lambda answer: (len(answer.words), answer.length))
    if short.length <= _SHORT:
        return results == (None, None) and long.contains(short)
    if short.length <= _BRIEF and short.denies != long.denies:
        return False
    shared = sum((Counter(short.words) & Counter(long.words)).values())
    return 2 * shared / (len(short.words) + len(long.words)) >= _OVERLAP


def _same_calls(one: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]]) -> bool:
    """Return whether both answers make the same calls, in any order."""
    unmatched = [(name, _arguments(text)) for name, text in other]
    for name, text in one:
        if (call := (name, _arguments(text))) not in unmatched:
            return False
        unmatched.remove(call)
    return not unmatched


def _arguments(text: str) -> Any:
    """Parse the arguments if they are JSON, else return the text."""
    try:
        return _parsed(text or "{}")
    except (ValueError, RecursionError):
        return text


def parsed_json(text: str) -> Any:
    """Return the value of a JSON object or list, with each number wrapped; None for other text."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return _parsed(text)
    except (ValueError, RecursionError):
        return None


def _parsed(text: str) -> Any:
    """Parse JSON with each number wrapped, because Python treats True and 1 as equal."""
    return json.loads(text, parse_int=_wrapped, parse_float=_wrapped)


def _wrapped(number: str) -> tuple[Decimal | str]:
    try:
        return (Decimal(number),)
    except InvalidOperation:  # the exponent is out of range
        return (number,)
