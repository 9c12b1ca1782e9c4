"""Privacy rules: content that only the model on this device may read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec

from ...protocol.decoding import UNREADABLE
from ...protocol.errors import ConfigurationError
from .detectors import BUILTIN, PERSONAL, presidio_detector, searcher
from .escapes import (
    ReadingBudget,
    TooLongError,
    base85_texts,
    decoded,
    encoded_texts,
    without_breaks,
    without_emphasis,
    without_tags,
)
from .text_views import (
    joined_messages,
    split_across_messages,
    split_across_values,
    strings,
    visible,
    written_and_visible,
)
from .unreadable import TOO_LONG, unreadable_field, unreadable_text

_JSON = re.compile(r'\s*+["[{]')
_EACH = 4  # characters charged to the budget per text, in addition to its length
MAX_READ = 2**22  # maximum characters read of one request, summed over all decoded forms of its texts
_SHORT = 2**13  # maximum characters of requests that are searched on the event loop instead of in a thread
_BETWEEN = "\n\ufdd0\n"  # separator of texts, with a noncharacter, so that no built-in rule matches across texts


def decoded_forms(text: str, budget: ReadingBudget) -> Iterator[str]:
    """Yield `text` and its decoded forms. If a form is JSON, also yield the forms of the strings in it."""
    waiting = [text]
    while waiting:
        text = waiting.pop()
        budget.spend(len(text) + _EACH)
        yield text
        plainest = text
        for plainest in decoded(text):
            budget.spend(len(plainest))
            yield plainest
        bare, joined = without_tags(plainest), without_breaks(plainest)
        if (shown := without_emphasis(bare if joined == plainest else without_tags(joined))) != plainest:
            budget.spend(len(shown))
            yield shown
        waiting.extend(encoded_texts(bare))
        waiting.extend(base85_texts(text, budget))
        if _JSON.match(text):
            try:
                text_found = msgspec.json.decode(text.encode("utf-8", "replace"))
            except UNREADABLE:  # not JSON, only text
                continue
            waiting.extend(filter(None, strings(text_found)))
            yield from split_across_values(text_found, budget)


@dataclass(frozen=True, slots=True)
class Privacy:
    """Rules that keep a request on the device. Raises ConfigurationError for an unusable rule."""

    # Names of built-in rules: `email`, `credit_card`, `iban`, `phone`, `api_key`.
    builtin: tuple[str, ...] = ()
    # Regular expressions by name, in the syntax of Rust's `regex`, which runs in linear time. They match anywhere;
    # `(?i)` at the start ignores case.
    patterns: dict[str, str] = field(default_factory=dict[str, str])
    # Entities that Presidio looks for, such as `PERSON` and `LOCATION`. Needs the package presidio-analyzer.
    presidio: tuple[str, ...] = ()
    # Language of the texts for Presidio.
    presidio_language: str = "en"
    # spaCy model for Presidio: the name of an installed package, or a folder.
    presidio_model: str = "en_core_web_sm"

    def __post_init__(self) -> None:
        for name in self.builtin:
            if name not in BUILTIN:
                raise ConfigurationError(
                    f"privacy.builtin: there is no rule {name!r}. Known: {', '.join(BUILTIN)}.", param="privacy.builtin"
                )
        for name, pattern in self.patterns.items():
            searcher(pattern, name)

    def __bool__(self) -> bool:
        return bool(self.builtin or self.patterns or self.presidio)


class PrivacyRules:
    """Compiled rules of one router. If any rule is on, content that no rule can read counts as a match."""

    def __init__(self, settings: Privacy) -> None:
        self._patterns = {name: searcher(pattern, name) for name, pattern in settings.patterns.items()}
        self._rules = {name: BUILTIN[name]() for name in settings.builtin} | self._patterns
        # `split_across_messages` finds card numbers, and tells them from columns of numbers.
        self._joined_rules = {name: search for name, search in self._rules.items() if name != "credit_card"}
        self._personal = presidio_detector(settings.presidio, settings.presidio_language, settings.presidio_model)
        self.is_on = bool(settings)

    async def match(self, body: dict[str, Any]) -> str | None:
        """Return the first rule that a text of `body` matches, else the kind of unreadable content in it, else None."""
        if not self.is_on:
            return None
        # Search short requests on the event loop. `all` stops counting characters at the limit.
        if self._personal is None and all(n <= _SHORT for n in accumulate(len(text) + 4 for text in strings(body))):
            return self._match(body)
        return await asyncio.to_thread(self._match, body)

    def search(self, text: str) -> str | None:
        """Return the rule that a single text matches, the kind of content that no rule can read, or None."""
        return self._search([text]) if self.is_on else None

    def _match(self, body: dict[str, Any]) -> str | None:
        texts = {name: value for name, value in body.items() if name != "seed"}  # the seed is not text
        return self._search(filter(None, strings(texts)), texts) or unreadable_field(body)

    def _search(self, texts: Iterable[str], body: Mapping[str, Any] | None = None) -> str | None:
        budget = ReadingBudget(MAX_READ)
        try:
            meant = [meaning for text in texts for meaning in decoded_forms(text, budget)]
            split_texts = (*split_across_messages(body or {}, budget), *split_across_values(body, budget))
            joined = list(joined_messages(body or {}, budget))
            return (
                _first(self._rules, visible(_BETWEEN.join((*meant, *split_texts)), budget))
                or _first(self._joined_rules, visible(_BETWEEN.join(joined), budget))
                or self._match_patterns((*meant, *joined), budget)
                or (PERSONAL if self._personal is not None and any(map(self._personal, meant)) else None)
                or next(filter(None, map(unreadable_text, meant)), None)
            )
        except TooLongError:
            return TOO_LONG

    def _match_patterns(self, texts: Iterable[str], budget: ReadingBudget) -> str | None:
        """Apply the user's patterns to each text separately, since a pattern may match the start or end of a text."""
        if not self._patterns:
            return None
        matched = (_first(self._patterns, written_and_visible(text, budget)) for text in dict.fromkeys(texts))
        return next((name for name in matched if name is not None), None)


def _first(rules: Mapping[str, Callable[[str], bool]], views: Collection[str]) -> str | None:
    return next((name for name, search in rules.items() if any(map(search, views))), None)
