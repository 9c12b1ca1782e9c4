"""Parts of an answer's text: words, numbers, and the sums, comparisons and lists that the text states."""

from __future__ import annotations

import re
from dataclasses import dataclass

# The regex engine skips ahead to the next digit for `\d\d*`; for `\d+` it tries every character.
NUMBER = re.compile(r"\d\d*(?:\.\d+)?")
_WORD = re.compile(r"\w+")
# Table for `str.translate` that replaces every character outside words by a blank.
_BLANKED = "".join(chr(code) if _WORD.match(chr(code)) else " " for code in range(128))
# The lookbehinds follow the first character, so that the engine can skip ahead to that character. Sums without a stated
# result match too: otherwise the engine would try each of their terms up to the end of the sum.
_STATEMENT = re.compile(
    r"([-\d](?<![\d.)*/×÷+-][-\d])(?<![*/×÷+-] [-\d])(?<!-(?!\d))\d*(?:\.\d+)?(?:\s*[-+*/×÷]\s*\d+(?:\.\d+)?)+)"
    r"(?:\s*=\s*(-?\d+(?:\.\d+)?))?"
)
_TERM = re.compile(r"([-+*/×÷]?)\s*(\d+(?:\.\d+)?)")
_INEQUALITY = re.compile(r"([-\d](?<![\d.][-\d])(?<!-(?!\d))\d*(?:\.\d+)?)\s*([<>])\s*(?=(-?\d+(?:\.\d+)?))")
_SEGMENT = re.compile(r"[,;:?!\n.](?:(?<!\.)|(?!\d))")
_ITEM = r"[^\s,;:<>.=?!]++(?:\.\d++)?"
_LIST = re.compile(rf"(?<![^\s,;:<>=?!]){_ITEM}(?:\s*[,<>]\s*{_ITEM}){{2,}}")
_INNER_ITEM = re.compile(rf"[,<>]\s*{_ITEM}\s*[,<>]")  # cheap pre-test: most texts have no match, every list has one
_SEPARATOR = re.compile(r"\s*[,<>]\s*")


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """Words, numbers, segments, stated facts and longest list of one answer."""

    words: list[str]
    numbers: list[str]
    # For each stated sum, whether it is true.
    sums: list[bool]
    # For each stated comparison, whether it is true.
    comparisons: list[bool]
    # Numbers and words of each segment, as returned by `segments`.
    segments: list[tuple[frozenset[str], frozenset[str]]]
    # Items of the longest list.
    items: list[str]

    def __add__(self, other: AnswerParts) -> AnswerParts:
        """Return the parts of the joined texts. Valid only if no part spans their boundary (see `answer_reader`)."""
        return AnswerParts(
            self.words + other.words,
            self.numbers + other.numbers,
            self.sums + other.sums,
            self.comparisons + other.comparisons,
            self.segments + other.segments,
            max(self.items, other.items, key=len),
        )


def parts_of(text: str) -> AnswerParts:
    return AnswerParts(
        words_of(text.lower()),
        NUMBER.findall(text),
        [_holds(left, stated) for left, stated in _STATEMENT.findall(text) if stated],
        _comparisons(text) if "<" in text or ">" in text else [],
        segments(text),
        _longest_list(text),
    )


def segments(text: str) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Split `text` at punctuation marks. Return the numbers and the words of each piece that contains a number."""
    numbered = ((piece, NUMBER.findall(piece)) for piece in _SEGMENT.split(text))
    return [(frozenset(numbers), frozenset(words_of(piece.lower()))) for piece, numbers in numbered if numbers]


def words_of(text: str) -> list[str]:
    """Return the words and numbers of `text`. ASCII text takes a faster path without a regular expression."""
    return text.translate(_BLANKED).split() if text.isascii() else _WORD.findall(text)


def _comparisons(text: str) -> list[bool]:
    return [
        float(left) < float(right) if sign == "<" else float(left) > float(right)
        for left, sign, right in _INEQUALITY.findall(text)
    ]


def _holds(left: str, right: str) -> bool:
    """Return whether the stated `left = right` is true; `left` is a chain of + - * /, with the usual precedence."""
    terms: list[float] = []
    for operator, digits in _TERM.findall(left):
        value = float(digits)
        if operator in ("*", "×"):
            terms[-1] *= value
        elif operator in ("/", "÷"):
            terms[-1] = terms[-1] / value if value else float("nan")
        else:
            terms.append(-value if operator == "-" else value)
    total, stated = sum(terms), float(right)
    return abs(total - stated) <= 1e-6 * max(1.0, abs(stated))


def _longest_list(text: str) -> list[str]:
    """Return the items of the longest list: three or more words or numbers between commas or comparison signs."""
    if not _INNER_ITEM.search(text):
        return []
    lists = [_SEPARATOR.split(match) for match in _LIST.findall(text)]
    return max(lists, key=len, default=list[str]())
