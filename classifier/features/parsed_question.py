"""A question as all gates read it, each part once: normalised, found inside its prompt, counted, its facts listed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from ..arrays import Array
from .answers.arithmetic import Given
from .answers.checks import Mentioned
from .conversation import EarlierConversation, conversation_measures
from .gate_inputs import PromptView
from .normalized_prompt import normalized_prompt
from .quantities import quantities
from .question import question_of
from .wording import wording


def repeated_question(prompt: PromptView) -> str:
    """The text that all prompts of one question share: no gate tells them apart."""
    return "\0".join((_question(prompt.text), *map(normalized_prompt, chain.from_iterable(prompt.earlier))))


def _question(prompt: str) -> str:
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
    # Of its wording, and at a lower weight that of the turns before it.
    counts: Array
    # As `conversation_measures`.
    conversation: Array
    # What an answer may refer to: the turns before it, and the question.
    context: str

    @classmethod
    def of(cls, prompt: PromptView) -> ParsedQuestion:
        text = _question(prompt.text)
        measures, counts = wording(text)
        if not prompt.earlier:
            return cls(text, measures, counts, conversation_measures(text, counts, None), text)
        before = EarlierConversation.of(prompt.earlier)
        relation = conversation_measures(text, counts, before)
        return cls(text, measures, np.maximum(counts, before.counts), relation, f"{before.text}\n{text}")

    @cached_property
    def mentioned(self) -> Mentioned:
        """The words, numbers and letters that an answer is held against."""
        return Mentioned.of(self.context)

    @cached_property
    def given(self) -> Given:
        """The facts that an answer's steps may start from."""
        return Given.of(self.context)

    @cached_property
    def quantities(self) -> Array:
        """As `quantities.quantities`."""
        return quantities(self.text)
