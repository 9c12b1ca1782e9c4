"""Reads an answer while it is being written, so that at its end only the last line is left.

Most lines end where nothing that is searched for can go on. So what is found in an answer is what is found in its
lines, and the complete ones can be read while the local model writes the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, Self, TypeVar

from .bounded_cache import BoundedCache

__all__ = ["AnswerReader"]

# Line breaks over which nothing goes on: sums need a number or an operator before them, lists a comma on either side.
_SETTLED = re.compile(r"\n(?:(?<=[A-Za-z.!?]\n)(?=[ \n]{0,4}[^\s,<>])|(?<=\d\n)(?=[ \n]{0,4}[A-Za-z#]))")
_TRIED = 8  # line breaks at most, from the end, when what was read ahead is looked for
_WORTH_READING = 20  # characters of new text


class Addable(Protocol):
    """Findings in two texts that meet at a line break, together as of one text."""

    def __add__(self, other: Self, /) -> Self: ...


Found = TypeVar("Found", bound=Addable)


class AnswerReader(Generic[Found]):
    """Remembers what `find` found in the complete lines of answers that are being written. Thread-safe.

    Answers are told apart by their text alone, so that nobody has to say when one begins or ends; the oldest are
    forgotten.
    """

    def __init__(self, find: Callable[[str], Found], most: int) -> None:
        self._find = find
        self._known: BoundedCache[str, Found] = BoundedCache(most)  # complete lines -> what is in them

    def read_ahead(self, text: str) -> None:
        """`text` is how far an answer has come."""
        end = next(_settled_ends(text), 0)
        if end == 0:
            return
        lines = text[:end]
        before, known = self._longest_known(lines)
        if end - len(before) < _WORTH_READING:
            return
        found = self._find(lines[len(before) :])
        self._known.drop(before)
        self._known.put(lines, found if known is None else known + found)

    def read(self, text: str) -> Found:
        """The findings in the whole answer."""
        before, known = self._longest_known(text)
        return self._find(text) if known is None else known + self._find(text[len(before) :])

    def _longest_known(self, text: str) -> tuple[str, Found | None]:
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
