"""Privacy rules: what a request must not say to anybody but the model on this device."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from ...protocol.errors import ConfigurationError
from ..request.json_narrowing import tables
from .detectors import BUILTIN, CARD_DIGITS, searcher
from .escapes import TooLongError
from .presidio import PERSONAL, presidio_detector
from .text_views import ReadingBudget, meanings, plain, strings, text_of_part, visible, written, written_and_visible
from .unreadable import TOO_LONG, unreadable_field, unreadable_text

MAX_READ = 2**22  # characters of one request, all readings of its texts together
_SHORT = 2**13  # characters: beyond it the search leaves the event loop to others
_BETWEEN = "\n\ufdd0\n"  # between two texts: no character, so no rule of ours reads on from one into the next
_MAX_WORD = 256
_LAST_WORD, _FIRST_WORD = re.compile(r"\S+\Z"), re.compile(rf"\S{{1,{_MAX_WORD}}}")
# The groups of digits that a text begins with, whatever marks stand before and behind them.
_HEAD = re.compile(r"[\W_]*+((?:\d++[\W_]{0,8}+)*+)[\W_]*+")


@dataclass(frozen=True, slots=True)
class Privacy:
    """Which rules keep a request on the device. Raises ConfigurationError for one that cannot be used."""

    # Names of rules in the package: `email`, `credit_card`, `iban`, `phone`, `api_key`.
    builtin: tuple[str, ...] = ()
    # Regular expressions by name, in the syntax of Rust's `regex`, which takes linear time. They match anywhere;
    # `(?i)` in front ignores case.
    patterns: dict[str, str] = field(default_factory=dict[str, str])
    # The entities that Presidio looks for, such as `PERSON` and `LOCATION`. It needs the package presidio-analyzer.
    presidio: tuple[str, ...] = ()
    # The language that Presidio takes texts to be in.
    presidio_language: str = "en"
    # The spaCy model with which Presidio reads: its name where it is installed, or its folder.
    presidio_model: str = "en_core_web_sm"

    def __post_init__(self) -> None:
        for name in self.builtin:
            if name not in BUILTIN:
                raise ConfigurationError(
                    f"privacy.builtin: there is no {name!r}. Known: {', '.join(BUILTIN)}.", param="privacy.builtin"
                )
        for name, pattern in self.patterns.items():
            searcher(pattern, name)

    def __bool__(self) -> bool:
        return bool(self.builtin or self.patterns or self.presidio)


class PrivacyRules:
    """The rules of one router, compiled. While any is on, what none of them can read counts as found."""

    def __init__(self, settings: Privacy) -> None:
        self._patterns = {name: searcher(pattern, name) for name, pattern in settings.patterns.items()}
        self._rules = {name: BUILTIN[name]() for name in settings.builtin} | self._patterns
        self._personal = presidio_detector(settings.presidio, settings.presidio_language, settings.presidio_model)
        self._on = bool(settings)

    async def match(self, body: dict[str, Any]) -> str | None:
        """The name of the first rule that `body` meets in any text of it, or what in it no rule can read; None if there
        is neither.
        """
        if not self._on:
            return None
        if self._personal is None and _is_short(body):
            return self._match(body)
        return await asyncio.to_thread(self._match, body)

    def search(self, text: str) -> str | None:
        """The same of one text."""
        return self._search([text]) if self._on else None

    def _match(self, body: dict[str, Any]) -> str | None:
        # A seed is no text.
        texts_by_role = {name: None if isinstance(value, int | float) else value for name, value in body.items()}
        return self._search(filter(None, strings(texts_by_role)), texts_by_role) or unreadable_field(body)

    def _search(self, texts: Iterable[str], body: Mapping[str, Any] | None = None) -> str | None:
        budget = ReadingBudget(MAX_READ)
        try:
            meant = [meaning for text in texts for meaning in meanings(text, budget)]
            return (
                _first(self._rules, visible(_BETWEEN.join((*meant, *_seams(body or {}, budget))), budget))
                or self._apart(meant, budget)
                or (PERSONAL if self._personal is not None and any(map(self._personal, meant)) else None)
                or next(filter(None, map(unreadable_text, meant)), None)
            )
        except TooLongError:
            return TOO_LONG

    def _apart(self, texts: Iterable[str], budget: ReadingBudget) -> str | None:
        """Only patterns ask for letters as they are written, and for where each text begins and ends."""
        if not self._patterns:
            return None
        matched = (_first(self._patterns, written_and_visible(text, budget)) for text in dict.fromkeys(texts))
        return next((name for name in matched if name is not None), None)


def _is_short(body: dict[str, Any]) -> bool:
    """Whether reading it takes less time than others should notice; counting ends where it does not."""
    return all(total <= _SHORT for total in accumulate(len(text) + 4 for text in strings(body)))


def _first(rules: Mapping[str, Callable[[str], bool]], views: Collection[str]) -> str | None:
    return next((name for name, found in rules.items() if any(map(found, views))), None)


def _seams(body: Mapping[str, Any], budget: ReadingBudget) -> Iterator[str]:
    """Words and long runs of digits that span two messages of one role, where one ends and the next starts."""
    texts_by_role: dict[Any, list[str]] = {}
    for message in tables(body.get("messages")) or ():
        content = message.get("content")
        text = content if isinstance(content, str) else "".join(map(text_of_part, tables(content) or ()))
        texts_by_role.setdefault(str(message.get("role")), []).append(text)
    for texts in texts_by_role.values():
        for before, after in pairwise(filter(None, texts)):
            if (end := _LAST_WORD.search(before[-_MAX_WORD:])) and (start := _FIRST_WORD.match(after)):
                yield end[0] + start[0]
        last: list[str] = []  # groups of digits, the latest first
        for text in (plain(written(text, budget)) for text in texts):
            head, only_digits = _groups(text)
            together = [*reversed(last), *_in_a_card(head)]
            if last and head and sum(map(len, together)) >= CARD_DIGITS[0]:
                yield " ".join(together)
            tail = [group[::-1] for group in _groups(text[::-1])[0]]
            last = _in_a_card([*tail, *last] if only_digits else tail)


def _groups(text: str) -> tuple[list[str], bool]:
    """The groups of digits that `text` begins with, and whether but for marks there is nothing else in it."""
    found = _HEAD.match(text)
    return (re.findall(r"\d+", found[1]), found.end() == len(text)) if found else ([], False)


def _in_a_card(groups: Sequence[str]) -> list[str]:
    """The first of `groups`, as many as one card may have on one side of a seam."""
    digits = accumulate(map(len, groups))
    return [group for group, total in zip(groups, digits, strict=True) if total < CARD_DIGITS[1]]
