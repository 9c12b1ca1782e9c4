"""The kinds of requests in a calibration. A policy says nothing about others, so they escalate."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...protocol.requests import Message
from ..graded_row import GradedRow

ENOUGH_PROMPTS = 30  # of a script, before a policy counts as calibrated on it
_GREEK_WORD = re.compile("[\u0370-\u03ff\u1f00-\u1fff]{2}")
_INSTRUCTIONS = ("system", "developer")
_LETTERS = ("Lu", "Ll", "Lt", "Lo")


@dataclass(frozen=True, slots=True)
class CalibratedOn:
    """As a policy's card has it. A card without it was made from English prompts of one turn."""

    # The scripts of the prompts, by their names in Unicode.
    scripts: tuple[str, ...] = ("Latin",)
    # The most turns of user and assistant in one prompt that some of them have.
    turns: int = 1

    @classmethod
    def of(cls, rows: Sequence[GradedRow]) -> CalibratedOn:
        """A script, or a length, that only a few have is left out."""
        prompts = Counter(script for row in rows for script in scripts_of(_text(row)))
        scripts = tuple(sorted(script for script, n in prompts.items() if n >= ENOUGH_PROMPTS))
        turns = sorted((_turns_of(row.messages) if row.messages else 1 for row in rows), reverse=True)
        return cls(scripts, next(iter(turns[ENOUGH_PROMPTS - 1 :]), 1))

    def lacks(self, messages: Sequence[Message]) -> str | None:
        """The trait of a conversation that no prompt of the calibration had; None if there is none."""
        turns = _turns_of(messages)
        if turns > self.turns:
            return f"conversations of {turns} turns"
        others = {script for message in messages for script in scripts_of(message.text)} - set(self.scripts)
        if others:
            return f"{' and '.join(sorted(others))} script"
        return None


def _text(row: GradedRow) -> str:
    return "\n".join(message.text for message in row.messages) if row.messages else row.prompt


def _turns_of(messages: Sequence[Message]) -> int:
    """Without the instructions."""
    return sum(message.role not in _INSTRUCTIONS for message in messages)


def scripts_of(text: str) -> frozenset[str]:
    """The scripts of its letters, such as Latin, Cyrillic or CJK. A lone Greek letter is a symbol, and of none."""
    if text.isascii():
        return frozenset({"Latin"}) if re.search("[A-Za-z]", text) else frozenset()
    letters = unicodedata.normalize("NFKC", "".join(set(text)))  # each once: a long text costs no more than a short one
    found = {_script(letter) for letter in set(letters)} - {""}
    return frozenset(found if _GREEK_WORD.search(text) else found - {"Greek"})


def _script(letter: str) -> str:
    """The first word of its name. Modifier letters belong to several scripts, and marks to their letters."""
    if unicodedata.category(letter) not in _LETTERS:
        return ""
    name = unicodedata.name(letter, "").partition(" ")[0]
    return name if name == "CJK" else name.capitalize()
