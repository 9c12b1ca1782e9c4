"""Words and card numbers that are split across messages, or across neighbouring values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from ..request.json_narrowing import rows, table, tables
from .detectors import CARD_DIGITS
from .escapes import ReadingBudget
from .text_views import plain, text_of_part, written

_MAX_WORD = 256
_DIGIT = re.compile("[0-9]")
_LAST_WORD, _FIRST_WORD = re.compile(r"\S+\Z"), re.compile(rf"\S{{1,{_MAX_WORD}}}")
# Digit groups at the start of a text, with any marks around them.
_HEAD = re.compile(r"[\W_]*+((?:\d++[\W_]{0,8}+)*+)[\W_]*+")


def split_across_messages(body: Mapping[str, Any], budget: ReadingBudget) -> Iterator[str]:
    """Yield words and card digits that span two consecutive messages of one role."""
    texts_by_role: dict[Any, list[str]] = {}
    for message in tables(body.get("messages")) or ():
        content = message.get("content")
        text = content if isinstance(content, str) else "".join(map(text_of_part, tables(content) or ()))
        texts_by_role.setdefault(str(message.get("role")), []).append(text)
    for texts in texts_by_role.values():
        for before, after in pairwise(filter(None, texts)):
            if (end := _LAST_WORD.search(before[-_MAX_WORD:])) and (start := _FIRST_WORD.match(after)):
                yield end[0] + start[0]
        yield from _split_digits(texts, budget)


def split_across_values(value: Any, budget: ReadingBudget) -> Iterator[str]:
    """Yield card digits that span neighbouring values of an object or a list, at any depth."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        entries = table(value)
        values = list(entries.values()) if entries is not None else rows(value) or []
        if len(values) > 1:
            yield from _split_digits([each if isinstance(each, str) else _number(each) for each in values], budget)
        waiting.extend(values)


def _split_digits(texts: Iterable[str], budget: ReadingBudget) -> Iterator[str]:
    """Yield the digit groups at the end of a text and the start of the next, if they have enough digits for a card."""
    last: list[str] = []  # groups at the end of the previous texts, the latest first
    for text in filter(None, map(str.strip, texts)):
        begin, end, whole = text[:_MAX_WORD], text[-_MAX_WORD:], len(text) <= _MAX_WORD
        if begin.isascii() and end.isascii() and not (_DIGIT.search(begin) or _DIGIT.search(end)):
            last = []
            continue
        begin = plain(written(begin, budget))
        end = begin if whole else plain(written(end, budget))
        head, only_digits = _groups(begin)
        together = [*reversed(last), *_card_groups(head)]
        if last and head and sum(map(len, together)) >= CARD_DIGITS[0]:
            yield " ".join(together)
        tail = [group[::-1] for group in _groups(end[::-1])[0]]
        last = _card_groups([*tail, *last] if only_digits and whole else tail)


def _number(value: object) -> str:
    return str(value) if isinstance(value, int) and 0 <= value < 10 ** CARD_DIGITS[1] else ""


def _groups(text: str) -> tuple[list[str], bool]:
    """Return the digit groups at the start of `text`, and whether `text` contains only digits and punctuation."""
    match = _HEAD.match(text)
    return (re.findall(r"\d+", match[1]), match.end() == len(text)) if match else ([], False)


def _card_groups(groups: Sequence[str]) -> list[str]:
    """Return the leading groups that together have fewer digits than the longest card number."""
    digits = accumulate(map(len, groups))
    return [group for group, total in zip(groups, digits, strict=True) if total < CARD_DIGITS[1]]
