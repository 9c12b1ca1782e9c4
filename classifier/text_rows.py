"""From graded rows to the numbers a text router learns from and decides by; training and inference share this file.

Before generation a router sees the question's wording. In a cascade it also sees checks of the local answer and, where
the file has them, summaries of its token signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import InvalidRequestError
from .answer_features import Mentioned, answer_checks
from .answer_parts import AnswerParts, parts_of
from .graded import GradedRow, TokenSignals
from .optional import load_module
from .question import question_of
from .run_features import signals
from .steps import FoundSteps, Given, find_steps, step_checks
from .views import Array, PromptView, RunView
from .wording import MEASURE_NAMES, wording

__all__ = [
    "N_WORDING",
    "TEXT_FEATURE_VERSION",
    "Answered",
    "Asked",
    "Features",
    "Mode",
    "TextRows",
    "featurise",
    "vector",
]

# Raise it with every change that alters any feature of any input, in any file that `vector` calls: a policy refuses
# features it was not trained on.
TEXT_FEATURE_VERSION = 1

Features = tuple[Array, Array]
Mode = Literal["prompt", "cascade"]
N_WORDING = len(MEASURE_NAMES)
_EMPTY = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class TextRows:
    """(n, COUNTS) sparse `counts` and (n, k) `measures`: of the wording, and in a cascade behind it of the answer."""

    counts: Any
    measures: Array

    def take(self, rows: NDArray[Any]) -> TextRows:
        return TextRows(self.counts[rows], self.measures[rows])


@dataclass(frozen=True)
class Asked:
    """The question inside a prompt and its wording, which both gates read."""

    question: str
    measures: Array
    counts: Array

    @classmethod
    def of(cls, prompt: str) -> Asked:
        question = question_of(prompt)
        return cls(question, *wording(question))

    @cached_property
    def mentioned(self) -> Mentioned:
        """What gate 3 holds the answer against; it can be read while the answer is being written."""
        return Mentioned.of(self.question)

    @cached_property
    def given(self) -> Given:
        return Given.of(self.question)

    def read_ahead(self) -> None:
        """Do now what gate 3 would have to do once the answer is there."""
        _ = self.mentioned, self.given


@dataclass(frozen=True, slots=True)
class Answered:
    """What gate 3 searches an answer for; of complete lines it can be found while the next are being written."""

    parts: AnswerParts
    steps: FoundSteps

    @classmethod
    def of(cls, text: str) -> Answered:
        return cls(parts_of(text), find_steps(text))

    def __add__(self, other: Answered) -> Answered:
        return Answered(self.parts + other.parts, self.steps + other.steps)


def vector(row: GradedRow, mode: Mode, asked: Asked | None = None, answered: Answered | None = None) -> Features:
    """The measures and the counts of one row; `asked`: what is known of its prompt from an earlier gate;
    `answered`: what is known of its answer.

    Raises InvalidRequestError if a cascade's row has no answer.
    """
    asked = asked or Asked.of(row.prompt)
    if mode == "prompt":
        return asked.measures, asked.counts
    if row.answer is None:
        raise InvalidRequestError("A cascade is judged by the weak tier's answer: add a column weak_response.")
    view = _view(asked.question, row)
    answered = answered or Answered.of(row.answer)
    checks = answer_checks(view, asked.mentioned, answered.parts)
    parts = (asked.measures, checks, step_checks(asked.given, row.answer, answered.steps))
    return np.concatenate((*parts, signals(view)) if row.signals else parts), asked.counts


def featurise(rows: Sequence[GradedRow], mode: Mode) -> TextRows:
    """Features of many rows. Raises as `vector` does, and if only some rows have token signals."""
    if mode == "cascade" and len({row.signals is None for row in rows}) > 1:
        raise InvalidRequestError("Either every row has token signals or none has.")
    found = [vector(row, mode) for row in rows]
    sparse = load_module("scipy.sparse", "train")
    # Stacked in pieces: dense counts of many thousand rows would not fit in memory.
    pieces = [
        sparse.csr_matrix(np.stack([counts for _, counts in found[i : i + 512]])) for i in range(0, len(found), 512)
    ]
    return TextRows(sparse.vstack(pieces).tocsr(), np.stack([measures for measures, _ in found]))


def _view(question: str, row: GradedRow) -> RunView:
    told = row.signals or TokenSignals(_EMPTY, _EMPTY, _EMPTY)
    prompt = PromptView(question, 1, len(row.prompt))
    return RunView(
        prompt, row.answer or "", told.logprobs, told.entropies, told.margins, _EMPTY, _EMPTY, None, finish_reason=""
    )
