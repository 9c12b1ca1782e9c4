"""Forms in which a text can be read: as written, with escapes and encodings decoded, and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from ...protocol.decoding import UNREADABLE
from .escapes import ReadingBudget, base85_texts, decoded, encoded_texts
from .split_values import split_across_values
from .text_views import strings

_JSON = re.compile(r'\s*+["[{]')
_EACH = 4  # characters charged to the budget per text, in addition to its length


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
        waiting.extend(encoded_texts(plainest))
        waiting.extend(base85_texts(text, budget))
        if _JSON.match(text):
            try:
                text_found = msgspec.json.decode(text.encode("utf-8", "replace"))
            except UNREADABLE:  # not JSON, only text
                continue
            waiting.extend(filter(None, strings(text_found)))
            yield from split_across_values(text_found, budget)
