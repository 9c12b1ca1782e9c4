"""Parts of an answer's text: its words and numbers, and the sums, comparisons and lists that it states."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A search for `\d\d*` skips to the next digit, one for `\d+` tries every character.
NUMBER = re.compile(r"\d\d*(?:\.\d+)?")
_WORD = re.compile(r"\w+")
# For `str.translate`: what belongs to no word becomes a blank.
_BLANKED = "".join(chr(code) if _WORD.match(chr(code)) else " " for code in range(128))
# What must not stand before a number is asked when its first character was read, which is quick in the same way.
# A sum that nothing follows is found too, with nothing stated: else each of its terms would be tried up to its end.
_STATEMENT = re.compile(
    r"([-\d](?<![\d.)*/×÷+-][-\d])(?<![*/×÷+-] [-\d])(?<!-(?!\d))\d*(?:\.\d+)?(?:\s*[-+*/×÷]\s*\d+(?:\.\d+)?)+)"
    r"(?:\s*=\s*(-?\d+(?:\.\d+)?))?"
)
_TERM = re.compile(r"([-+*/×÷]?)\s*(\d+(?:\.\d+)?)")
_INEQUALITY = re.compile(r"([-\d](?<![\d.][-\d])(?<!-(?!\d))\d*(?:\.\d+)?)\s*([<>])\s*(?=(-?\d+(?:\.\d+)?))")
_SEGMENT = re.compile(r"[,;:?!\n.](?:(?<!\.)|(?!\d))")
_ITEM = r"[^\s,;:<>.=?!]++(?:\.\d++)?"
_LIST = re.compile(rf"(?<![^\s,;:<>=?!]){_ITEM}(?:\s*[,<>]\s*{_ITEM}){{2,}}")
_INNER_ITEM = re.compile(rf"[,<>]\s*{_ITEM}\s*[,<>]")  # every list has one, and most texts have none
_SEPARATOR = re.compile(r"\s*[,<>]\s*")


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """The parts of one answer."""

    words: list[str]
    numbers: list[str]
    # Whether each stated sum is true.
    sums: list[bool]
    # Whether each stated comparison is true.
    comparisons: list[bool]
    # As `segments` has them.
    segments: list[tuple[frozenset[str], frozenset[str]]]
    # Of the longest list.
    items: list[str]

    def __add__(self, other: AnswerParts) -> AnswerParts:
        """Of both texts together, if they meet where nothing goes on (`answer_reader`)."""
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
    """The numbers and the words of each piece of `text` between marks that has a number."""
    numbered = ((piece, NUMBER.findall(piece)) for piece in _SEGMENT.split(text))
    return [(frozenset(numbers), frozenset(words_of(piece.lower()))) for piece, numbers in numbered if numbers]


def words_of(text: str) -> list[str]:
    """The matches of `_WORD`, without a regular expression where there is only ASCII."""
    return text.translate(_BLANKED).split() if text.isascii() else _WORD.findall(text)


def _comparisons(text: str) -> list[bool]:
    return [
        float(left) < float(right) if sign == "<" else float(left) > float(right)
        for left, sign, right in _INEQUALITY.findall(text)
    ]


def _holds(left: str, right: str) -> bool:
    """Whether the stated `left = right` is true; `left` is a chain of + - * /, the products binding tighter."""
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
    """The items of the longest list in `text`: three or more words or numbers between commas or comparison signs."""
    if not _INNER_ITEM.search(text):
        return []
    lists = [_SEPARATOR.split(found) for found in _LIST.findall(text)]
    return max(lists, key=len, default=list[str]())
