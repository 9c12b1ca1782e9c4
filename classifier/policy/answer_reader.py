"""Reads an answer while it is being written, so that at its end only the last line is left.

Most lines end where nothing that is searched for can go on. So what is found in an answer is what is found in its
lines, and the complete ones can be read while the local model writes the next.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TypeVar

from ...protocol.safety.bounded_cache import BoundedCache
from ..features.blocks import Answered
from ..features.gate_inputs import QUESTIONS_AT_ONCE

Value = TypeVar("Value")
_MAX_BYTES = 2**25
_GROWTH = 8  # bytes of what is made of a text, at most, for each byte of it; names and numbers in it are objects
_OVERHEAD = 2**16  # bytes of an entry whatever its text: n-gram counts


class TextCache(BoundedCache[str, Value]):
    """A cache of what was made of texts: callers decide how long these are."""

    def __init__(self, most: int = QUESTIONS_AT_ONCE, max_bytes: int = _MAX_BYTES) -> None:
        super().__init__(most, max_bytes, lambda text, _: _OVERHEAD + _GROWTH * sys.getsizeof(text))


# Line breaks over which nothing goes on: sums need a number or an operator before them, lists a comma on either side.
_SETTLED = re.compile(r"\n(?:(?<=[A-Za-z.!?]\n)(?=[ \n]{0,4}[^\s,<>])|(?<=\d\n)(?=[ \n]{0,4}[A-Za-z#]))")
_TRIED = 8  # line breaks at most, from the end, when what was read ahead is looked for
_WORTH_READING = 20  # characters of new text


class AnswerReader:
    """Remembers what was found in the complete lines of answers that are being written. Thread-safe.

    Answers are told apart by their text alone, so that nobody has to say when one begins or ends; the oldest are
    forgotten.
    """

    def __init__(self, most: int = QUESTIONS_AT_ONCE) -> None:
        self._known: TextCache[Answered] = TextCache(most)  # complete lines -> what is in them

    def read_ahead(self, text: str) -> None:
        """`text` is how far an answer has come."""
        end = next(_settled_ends(text), 0)
        if end == 0:
            return
        lines = text[:end]
        before, known = self._longest_known(lines)
        if end - len(before) < _WORTH_READING:
            return
        found = Answered.of(lines[len(before) :])
        self._known.drop(before)
        self._known.put(lines, found if known is None else known + found)

    def read(self, text: str) -> Answered:
        """The findings in the whole answer."""
        before, known = self._longest_known(text)
        return Answered.of(text) if known is None else known + Answered.of(text[len(before) :])

    def _longest_known(self, text: str) -> tuple[str, Answered | None]:
        for end in _settled_ends(text + "\n#"):
            known = self._known.get(text[:end])
            if known is not None:
                return text[:end], known
        return "", None


def _settled_ends(text: str) -> Iterator[int]:
    """The last few line breaks of `text` at which it may be cut, the last first."""
    ends = [found.start() for found in _SETTLED.finditer(text)]
    for end in ends[: -_TRIED - 1 : -1]:
        if text.rfind("(", 0, end) <= text.rfind(")", 0, end) and text.rfind("<", 0, end) <= text.rfind(">", 0, end):
            yield end
