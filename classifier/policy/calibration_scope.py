"""Kinds of requests in a calibration: writing systems and numbers of turns. Requests of other kinds escalate."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...protocol.requests import Message
from ..graded_row import GradedRow

ENOUGH_PROMPTS = 30  # minimum number of prompts in a writing system for a policy to count as calibrated on it
_GREEK_WORD = re.compile("[\u0370-\u03ff\u1f00-\u1fff]{2}")
_INSTRUCTIONS = ("system", "developer")
_LETTERS = ("Lu", "Ll", "Lt", "Lo")


@dataclass(frozen=True, slots=True)
class CalibrationScope:
    """Kinds of requests as stored in a policy's card. The defaults apply to older cards, which lack this entry."""

    # Writing systems of the prompts, by Unicode name.
    scripts: tuple[str, ...] = ("Latin",)
    # Highest number of user and assistant turns that at least `ENOUGH_PROMPTS` prompts reach.
    turns: int = 1

    @classmethod
    def of(cls, rows: Sequence[GradedRow]) -> CalibrationScope:
        """Return the writing systems and the number of turns found in at least `ENOUGH_PROMPTS` of the rows."""
        prompts = Counter(script for row in rows for script in scripts_of(_text(row)))
        scripts = tuple(sorted(script for script, n in prompts.items() if n >= ENOUGH_PROMPTS))
        turns = sorted((_turns_of(row.messages) if row.messages else 1 for row in rows), reverse=True)
        return cls(scripts, next(iter(turns[ENOUGH_PROMPTS - 1 :]), 1))

    def lacks(self, messages: Sequence[Message]) -> str | None:
        """Return a trait of the conversation that the calibration did not cover, such as "Greek script", or None."""
        turns = _turns_of(messages)
        if turns > self.turns:
            return f"conversations of {turns} turns"
        unseen_scripts = {script for message in messages for script in scripts_of(message.text)} - set(self.scripts)
        if unseen_scripts:
            return f"{' and '.join(sorted(unseen_scripts))} script"
        return None


def _text(row: GradedRow) -> str:
    return "\n".join(message.text for message in row.messages) if row.messages else row.prompt


def _turns_of(messages: Sequence[Message]) -> int:
    """Return the number of messages, instructions excluded."""
    return sum(message.role not in _INSTRUCTIONS for message in messages)


def scripts_of(text: str) -> frozenset[str]:
    """Return the writing systems of the letters, such as Latin or CJK. A lone Greek letter counts as a symbol."""
    if text.isascii():
        return frozenset({"Latin"}) if re.search("[A-Za-z]", text) else frozenset()
    letters = unicodedata.normalize("NFKC", "".join(set(text)))  # each character once, for speed on long texts
    scripts = {_script(letter) for letter in set(letters)} - {""}
    return frozenset(scripts if _GREEK_WORD.search(text) else scripts - {"Greek"})


def _script(letter: str) -> str:
    """Return the first word of the letter's Unicode name; "" for marks, which several writing systems share."""
    if unicodedata.category(letter) not in _LETTERS:
        return ""
    name = unicodedata.name(letter, "").partition(" ")[0]
    return name if name == "CJK" else name.capitalize()
