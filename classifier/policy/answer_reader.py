"""Incremental parsing of an answer during generation, so that only the last line remains to be parsed at the end.

No parsed element, such as a sum or a list, spans a safe line break (`_SETTLED`). Complete lines can therefore be parsed
while the local model writes the next lines, and their findings are added up.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TypeVar

from ...protocol.safety.bounded_cache import BoundedCache
from ..features.blocks import AnswerFindings
from ..features.gate_inputs import QUESTIONS_AT_ONCE

Value = TypeVar("Value")
_MAX_BYTES = 2**25
_GROWTH = 8  # maximum bytes of a parsed entry per byte of text, because words and numbers become objects
_OVERHEAD = 2**16  # bytes of an entry regardless of its text, mostly n-gram counts


class TextCache(BoundedCache[str, Value]):
    """LRU cache keyed by text and bounded in bytes; callers limit the length of the texts."""

    def __init__(self, most: int = QUESTIONS_AT_ONCE, max_bytes: int = _MAX_BYTES) -> None:
        super().__init__(most, max_bytes, lambda text, _: _OVERHEAD + _GROWTH * sys.getsizeof(text))


# Line breaks that no parsed element spans. Only a number or an operator before the break could continue a sum, and only
# a comma next to the break could continue a list.
_SETTLED = re.compile(r"\n(?:(?<=[A-Za-z.!?]\n)(?=[ \n]{0,4}[^\s,<>])|(?<=\d\n)(?=[ \n]{0,4}[A-Za-z#]))")
_TRIED = 8  # maximum number of line breaks to try, last first, to find text that was already parsed
_WORTH_READING = 20  # minimum number of new characters to parse at once


class AnswerReader:
    """LRU cache of the findings in the complete lines of unfinished answers. Thread-safe.

    Answers are keyed by their text alone, so that callers need not report when an answer starts or ends.
    """

    def __init__(self, most: int = QUESTIONS_AT_ONCE) -> None:
        self._known: TextCache[AnswerFindings] = TextCache(most)  # complete lines of an answer -> their findings

    def read_ahead(self, text: str) -> None:
        """Parse the complete lines of `text`, the answer as generated so far."""
        end = next(_settled_ends(text), 0)
        if end == 0:
            return
        lines = text[:end]
        before, earlier = self._longest_known(lines)
        if end - len(before) < _WORTH_READING:
            return
        findings = AnswerFindings.of(lines[len(before) :])
        self._known.drop(before)
        self._known.put(lines, findings if earlier is None else earlier + findings)

    def read(self, text: str) -> AnswerFindings:
        """Return the findings in the whole answer."""
        before, earlier = self._longest_known(text)
        return AnswerFindings.of(text) if earlier is None else earlier + AnswerFindings.of(text[len(before) :])

    def _longest_known(self, text: str) -> tuple[str, AnswerFindings | None]:
        for end in _settled_ends(text + "\n#"):
            findings = self._known.get(text[:end])
            if findings is not None:
                return text[:end], findings
        return "", None


def _settled_ends(text: str) -> Iterator[int]:
    """Yield the last few line breaks of `text` where it may be split, last first."""
    ends = [match.start() for match in _SETTLED.finditer(text)]
    for end in ends[: -_TRIED - 1 : -1]:
        if text.rfind("(", 0, end) <= text.rfind(")", 0, end) and text.rfind("<", 0, end) <= text.rfind(">", 0, end):
            yield end
