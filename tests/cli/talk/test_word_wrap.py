"""Streamed text is broken between words, whatever the pieces are that it comes in."""

from __future__ import annotations

import re

import pytest
from updraft.cli.talk.word_wrap import WordWrap

TEXT = "The quick brown fox\n  jumps over  the lazy dog, and then it sleeps.\n\n- one\n- two three four five six"


def wrapped(text: str, columns: int, size: int) -> str:
    shown: list[str] = []
    wrap = WordWrap(shown.append, columns)
    for start in range(0, len(text), size):
        wrap.feed(text[start : start + size])
    wrap.end()
    return "".join(shown)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("columns", [12, 20, 200])
def test_lines_fit_and_words_stay_whole(size: int, columns: int) -> None:
    shown = wrapped(TEXT, columns, size)
    assert shown.split() == TEXT.split()
    assert max(map(len, shown.split("\n"))) <= columns
    assert wrapped(TEXT, 200, size) == TEXT


def test_a_line_that_just_fits_is_not_broken() -> None:
    assert wrapped("abcd efgh", 9, 1) == "abcd efgh"
    assert wrapped("abcd efgh ijk", 9, 1) == "abcd efgh\nijk"
    assert wrapped("abcd efghi", 9, 1) == "abcd\nefghi"


def test_a_word_longer_than_a_line_is_left_to_the_terminal() -> None:
    assert wrapped("go to https://example.org/a/long/path now", 12, 1).split("\n")[0] == "go to"
    assert "https://example.org/a/long/path" in wrapped("go to https://example.org/a/long/path now", 12, 100)


def test_wide_characters_count_twice() -> None:
    shown = wrapped("日本 日本 日本", 10, 1)
    assert shown == "日本 日本\n日本"


def test_text_without_blanks_is_shown_as_it_comes() -> None:
    shown: list[str] = []
    wrap = WordWrap(shown.append, 10)
    wrap.feed("日" * 30)
    assert "".join(shown) == "日" * 30
    assert not re.search(r"\n", "".join(shown))
