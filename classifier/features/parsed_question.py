"""A question as all gates read it, each part once: normalised, found inside its prompt, counted, its facts listed.

"And why?" is judged by the question that it follows. The wording of the last turns joins the question's n-grams at a
lower weight, and a block of measures says how the question stands to them: zeros where it follows nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import log1p

import numpy as np

from ..arrays import Array
from .answers.arithmetic import Given
from .answers.checks import Mentioned
from .answers.parts import words_of
from .gate_inputs import EarlierTurn, PromptView
from .quantities import quantities
from .question import normalized_prompt, question_of
from .wording import COUNTS, MEASURE_NAMES, wording

_QUESTION, _ANSWER = 0.5, 0.25  # weight of the wording, where the question's own is one


@dataclass(frozen=True)
class EarlierConversation:
    """The turns before a question, normalised: what was asked and what the answers began with, the latest last."""

    questions: tuple[str, ...]
    answers: tuple[str, ...]
    # Of what was asked, as `wording` has them.
    measures: Array
    # Of all turns by their weights; `wording` counts of the same form.
    counts: Array

    @classmethod
    def of(cls, earlier: Sequence[EarlierTurn]) -> EarlierConversation:
        questions = tuple(normalized_prompt(question_of(normalized_prompt(turn.question))) for turn in earlier)
        answers = tuple(normalized_prompt(turn.answer) for turn in earlier)
        measures, counts = wording("\n".join(questions))
        _, answered = wording("\n".join(answers))
        return cls(questions, answers, measures, np.maximum(_QUESTION * counts, _ANSWER * answered))

    @property
    def text(self) -> str:
        return "\n".join(chain.from_iterable(zip(self.questions, self.answers, strict=True)))


def conversation_measures(question: str, counts: Array, before: EarlierConversation | None) -> Array:
    """(len(CONVERSATION_NAMES),) float32 of a normalised question, the counts of its wording, and what it follows."""
    if before is None:
        return np.zeros(len(CONVERSATION_NAMES), np.float32)
    relation = np.array([*_relation(question, counts, before).values()], np.float32)
    return np.concatenate((relation, before.measures))


def _relation(question: str, counts: Array, before: EarlierConversation) -> dict[str, float]:
    words = words_of(question)
    questions, answers = (words_of("\n".join(texts)) for texts in (before.questions, before.answers))
    length = float(np.linalg.norm(counts) * np.linalg.norm(before.counts))
    return {
        "turns": log1p(len(before.questions)),
        "question_words": log1p(len(words)),
        "earlier_words": log1p(len(questions)),
        "answer_words": log1p(len(answers)),
        "words_from_questions": _share(words, questions),
        "words_from_answers": _share(words, answers),
        "similarity": float(counts @ before.counts) / max(length, 1e-9),
    }


def _share(words: Sequence[str], known: Sequence[str]) -> float:
    return sum(map(frozenset(known).__contains__, words)) / max(len(words), 1)


_NAMES = _relation("", np.zeros(COUNTS, np.float32), EarlierConversation.of(()))
CONVERSATION_NAMES = (*_NAMES, *(f"earlier_{name}" for name in MEASURE_NAMES))


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
