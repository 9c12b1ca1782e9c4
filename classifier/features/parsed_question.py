"""A question as all gates read it, each part once: found inside its prompt, folded, counted, and its facts listed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..arrays import Array
from .answer_checks import Mentioned
from .arithmetic_checks import Given
from .quantities import quantities
from .question import question_of
from .wording import folded, wording

__all__ = ["ParsedQuestion", "repeated_question"]


def repeated_question(prompt: str) -> str:
    """What the prompts of one question share: no gate tells them apart."""
    return folded(question_of(prompt))


@dataclass(frozen=True)
class ParsedQuestion:
    """The question inside a prompt, `text` as it is when folded, and its wording: measures and counts.

    What else a gate wants is found when it is first asked for, which may be while the answer is being written.
    """

    question: str
    text: str
    measures: Array
    counts: Array

    @classmethod
    def of(cls, prompt: str) -> ParsedQuestion:
        question = question_of(prompt)
        text = folded(question)
        return cls(question, text, *wording(text))

    @cached_property
    def mentioned(self) -> Mentioned:
        """What an answer's words, numbers and letters are held against."""
        return Mentioned.of(self.question)

    @cached_property
    def given(self) -> Given:
        """What an answer's steps may start from."""
        return Given.of(self.question)

    @cached_property
    def quantities(self) -> Array:
        """As `quantities.quantities`."""
        return quantities(self.text)
