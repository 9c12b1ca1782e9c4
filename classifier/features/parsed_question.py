"""A question parsed once for all gates: extracted from its prompt, normalised, and converted to features.

A follow-up such as "And why?" is judged with the question before it. The wording of the last turns is added to
the question's n-grams at a lower weight, and a block of features compares the question with these turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import log1p

import numpy as np

from ..arrays import Array
from .answers.arithmetic import QuestionFacts
from .answers.checks import QuestionParts
from .answers.parts import words_of
from .gate_inputs import EarlierTurn, PromptView
from .quantities import quantities
from .question import normalized_prompt, question_of
from .wording import COUNTS, MEASURE_NAMES, wording

_QUESTION, _ANSWER = 0.5, 0.25  # weights of earlier questions and answers in the n-grams; the question itself has 1


@dataclass(frozen=True)
class EarlierConversation:
    """Normalised earlier turns: the questions and the beginnings of the answers, oldest first."""

    questions: tuple[str, ...]
    answers: tuple[str, ...]
    # Measures of the wording of the questions, from `wording`.
    measures: Array
    # Weighted n-gram counts of all turns, in the format of `wording`.
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
    """Return features, (len(CONVERSATION_NAMES),) float32, that compare a question with the earlier turns."""
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


def _share(words: Sequence[str], vocabulary: Sequence[str]) -> float:
    return sum(map(frozenset(vocabulary).__contains__, words)) / max(len(words), 1)


_NAMES = _relation("", np.zeros(COUNTS, np.float32), EarlierConversation.of(()))
CONVERSATION_NAMES = (*_NAMES, *(f"earlier_{name}" for name in MEASURE_NAMES))


def repeated_question(prompt: PromptView) -> str:
    """Return a key that is equal for prompts with the same normalised question and earlier turns."""
    return "\0".join((_question(prompt.text), *map(normalized_prompt, chain.from_iterable(prompt.earlier))))


def _question(prompt: str) -> str:
    whole = normalized_prompt(prompt)
    question = question_of(whole)
    return whole if question == whole else normalized_prompt(question)


@dataclass(frozen=True)
class ParsedQuestion:
    """The normalised question in a prompt, with the measures and n-gram counts of its wording.

    The properties are computed on first use, which may be while the local model writes the answer.
    """

    text: str
    measures: Array
    # N-gram counts of the question, merged with the counts of the earlier turns at a lower weight.
    counts: Array
    # Comparison with the earlier turns, from `conversation_measures`.
    conversation: Array
    # Text that an answer may refer to: the earlier turns and the question.
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
    def mentioned(self) -> QuestionParts:
        """Words, numbers and letters of the conversation, to compare an answer with."""
        return QuestionParts.of(self.context)

    @cached_property
    def given(self) -> QuestionFacts:
        return QuestionFacts.of(self.context)

    @cached_property
    def quantities(self) -> Array:
        """Measures of the question's numbers, lists, quotes and repetitions."""
        return quantities(self.text)
