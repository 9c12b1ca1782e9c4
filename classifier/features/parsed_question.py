"""A question as all gates read it, each part once: normalised, found inside its prompt, counted, its facts listed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..arrays import Array
from .answer_checks import Mentioned
from .arithmetic_checks import Given
from .normalized_prompt import normalized_prompt
from .quantities import quantities
from .question import question_of
from .wording import wording

__all__ = ["ParsedQuestion", "repeated_question"]


def repeated_question(prompt: str) -> str:
    """What the prompts of one question share: no gate tells them apart."""
    whole = normalized_prompt(prompt)
    question = question_of(whole)
    return whole if question == whole else normalized_prompt(question)


@dataclass(frozen=True)
class ParsedQuestion:
    """The normalised question inside a prompt, and its wording: measures and counts. No gate reads anything else of it.

    What else a gate wants is found when it is first asked for, which may be while the answer is being written.
    """

    text: str
    measures: Array
    counts: Array

    @classmethod
    def of(cls, prompt: str) -> ParsedQuestion:
        text = repeated_question(prompt)
        return cls(text, *wording(text))

    @cached_property
    def mentioned(self) -> Mentioned:
        """What an answer's words, numbers and letters are held against."""
        return Mentioned.of(self.text)

    @cached_property
    def given(self) -> Given:
        """What an answer's steps may start from."""
        return Given.of(self.text)

    @cached_property
    def quantities(self) -> Array:
        """As `quantities.quantities`."""
        return quantities(self.text)
