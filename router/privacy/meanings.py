"""A text's meanings beside its letters: its escapes and encodings decoded, its JSON read."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from ...protocol.decoding import UNREADABLE
from .escapes import ReadingBudget, base85_texts, decoded, encoded_texts
from .seams import value_seams
from .text_views import strings

_JSON = re.compile(r'\s*+["[{]')
_EACH = 4  # what a text costs beside its characters


def meanings(text: str, budget: ReadingBudget) -> Iterator[str]:
    """`text`; what its escapes stand for; and if it is JSON what that says, where a string may be JSON again."""
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
            except UNREADABLE:  # then it is only text
                continue
            waiting.extend(filter(None, strings(text_found)))
            yield from value_seams(text_found, budget)
