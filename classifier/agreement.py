"""Grades two answers to one question against each other, where nobody knows the right one.

The cloud's answer stands for the truth unless it is none (empty, cut off, a refusal). The local answer counts as good
if it says the same: the same JSON, the same final number, the same few words, or in longer answers mostly the same
words. What is right in other words, or wrong in both, is graded wrongly: this is the price of having no reference.
"""

from __future__ import annotations

import json
import re
from collections import Counter
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
    """One tier's answer; `finish_reason` as on the wire."""

    text: str
    finish_reason: str = "stop"

    @property
    def stands(self) -> bool:
        """Whether it is an answer at all."""
        return bool(self.text.strip()) and self.finish_reason != "length" and REFUSAL.search(self.text) is None


def grades(local: Said, cloud: Said) -> tuple[float, float]:
    """The scores of the local and of the cloud's answer, 0 or 1 each."""
    if not cloud.stands:
        return float(local.stands), 0.0
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
