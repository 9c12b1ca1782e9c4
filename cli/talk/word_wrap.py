"""Word wrapping of streamed text at the terminal's width; a word is shown once it is complete."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


class WordWrap:
    """Wraps text between words. Call `feed` with each piece of text, and `end` after the last piece."""

    def __init__(self, show: Callable[[str], None], columns: int) -> None:
        self._show, self._columns = show, columns
        self._column = 0
        # Blanks before the next word; dropped if the line breaks there.
        self._blanks = ""
        self._word = ""

    def feed(self, text: str) -> None:
        for part in _PARTS.findall(text):
            if part == "\n":
                self.end()
                self._show("\n")
                self._column = 0
            elif part.isspace():
                self._end_word()
                self._blanks += part
            else:
                self._word += part
                if _cells(self._word) >= self._columns:  # too long, such as a URL: the terminal breaks the line
                    self._end_word()

    def end(self) -> None:
        self._end_word()
        self._blanks = ""

    def _end_word(self) -> None:
        if not self._word:
            return
        text = self._blanks + self._word
        if self._column and self._blanks and self._column + _cells(text) > self._columns:
            text, self._column = f"\n{self._word}", 0
        self._show(text)
        self._column += _cells(text.lstrip("\n"))
        if self._column > self._columns:  # the terminal broke the line
            self._column = self._column % self._columns or self._columns
        self._blanks = self._word = ""


@contextmanager
def wrapped(show: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Yield `show` with word wrapping at the terminal's width; unchanged if standard output is not a terminal."""
    if not sys.stdout.isatty():
        yield show
        return
    wrap = WordWrap(show, shutil.get_terminal_size().columns)
    try:
        yield wrap.feed
    finally:
        wrap.end()


def _cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text.expandtabs(8))
