"""Grades two answers to one question against each other, where nobody knows the right one.

The cloud's answer stands for the truth unless it is none (empty, cut off, a refusal). The local answer counts as good
if it says the same: the same JSON, the same final number, the same few words, or in longer answers mostly the same
words; of answers that call tools, the same functions with the same arguments. What is right in other words, or wrong in
both, is graded wrongly: this is the price of having no reference.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .answer_features import REFUSAL
from .steps import final_number

__all__ = ["GRADING", "Said", "agree", "grades"]

GRADING = (
    "agreement: the cloud's answer counts as right unless it is empty, cut off or a refusal; the local one if it agrees"
)
_WORD = re.compile(r"\w+")
_SHORT = 12
_OVERLAP = 0.6


@dataclass(frozen=True, slots=True)
class Said:
    """One tier's answer; `finish_reason` as on the wire. `calls`: name and arguments, as they were written."""

    text: str
    finish_reason: str = "stop"
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def stands(self) -> bool:
        """Whether it is an answer at all."""
        told = bool(self.text.strip()) and REFUSAL.search(self.text) is None
        return (told or bool(self.calls)) and self.finish_reason != "length"


def grades(local: Said, cloud: Said) -> tuple[float, float]:
    """The scores of the local and of the cloud's answer, 0 or 1 each."""
    if not cloud.stands:
        return float(local.stands), 0.0
    if local.calls or cloud.calls:
        return float(local.stands and _same_calls(local.calls, cloud.calls)), 1.0
    return float(local.stands and agree(local.text, cloud.text)), 1.0


def agree(one: str, other: str) -> bool:
    """Whether two answers say the same. Symmetric."""
    structured = _json(one), _json(other)
    if None not in structured:
        return structured[0] == structured[1]
    words = _WORD.findall(one.casefold()), _WORD.findall(other.casefold())
    if words[0] == words[1]:
        return True
    numbers = final_number(one)[0], final_number(other)[0]
    if None not in numbers:
        return numbers[0] == numbers[1]
    short, long = sorted(words, key=len)
    if len(short) <= _SHORT:
        return numbers == (None, None) and _holds(long, short)
    shared = sum((Counter(short) & Counter(long)).values())
    return 2 * shared / (len(short) + len(long)) >= _OVERLAP


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
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


def _holds(long: list[str], short: list[str]) -> bool:
    """Whether the words of a short answer stand in the other in a row ("Paris" in "It is Paris")."""
    width = len(short)
    return width > 0 and any(long[i : i + width] == short for i in range(len(long) - width + 1))


def _json(text: str) -> Any:
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
