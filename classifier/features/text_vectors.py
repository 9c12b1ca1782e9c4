"""From graded rows to the numbers a text router learns from and decides by; training and inference share this file.

Before generation a router sees the question's wording; while the local model writes also a summary of the first token
signals; in a cascade checks of the whole answer and, where the file has them, a summary of all its token signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import InvalidRequestError
from ..arrays import Array, Bools
from ..graded_row import AnswerSignals, GradedRow
from ..optional import load_module
from .answer_checks import ANSWER_NAMES, answer_checks
from .answer_parts import AnswerParts, parts_of
from .arithmetic_checks import STEP_NAMES, FoundSteps, find_steps, step_checks
from .gate_inputs import PromptView, RunView
from .parsed_question import ParsedQuestion
from .token_signals import SIGNAL_NAMES, signals
from .wording import MEASURE_NAMES

__all__ = [
    "N_CASCADE",
    "N_WORDING",
    "OPENING_TOKENS",
    "TEXT_FEATURE_VERSION",
    "Answered",
    "Features",
    "Mode",
    "TextRows",
    "featurise",
    "go_on",
    "has_opening",
    "recalled",
    "remembered",
    "vector",
]

# Raise it with every change that alters any feature of any input, in any file that `vector` calls: a policy refuses
# features it was not trained on.
TEXT_FEATURE_VERSION = 2

Features = tuple[Array, Array]
# Before generation, while generating, and after it.
Mode = Literal["prompt", "opening", "cascade"]
OPENING_TOKENS = 8
N_WORDING = len(MEASURE_NAMES)
# Of a cascade with token signals, and where they tell the number of tokens.
N_CASCADE = N_WORDING + len(ANSWER_NAMES) + len(STEP_NAMES) + len(SIGNAL_NAMES)
_TOKENS_WRITTEN = N_CASCADE - len(SIGNAL_NAMES) + SIGNAL_NAMES.index("tokens")
_EMPTY = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class TextRows:
    """(n, COUNTS) sparse `counts` and (n, k) `measures`: of the wording, and behind it those of an answer or its
    opening.
    """

    counts: Any
    measures: Array

    def take(self, rows: NDArray[Any]) -> TextRows:
        return TextRows(self.counts[rows], self.measures[rows])


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


def vector(
    row: GradedRow, mode: Mode, asked: ParsedQuestion | None = None, answered: Answered | None = None
) -> Features:
    """The measures and the counts of one row; `asked`: what is known of its prompt from an earlier gate;
    `answered`: what is known of its answer.

    Raises InvalidRequestError if a cascade's row has no answer, or one to judge by its opening has no token signals.
    """
    asked = asked or ParsedQuestion.of(row.prompt)
    if mode == "prompt":
        return asked.measures, asked.counts
    if mode == "opening":
        return np.concatenate((asked.measures, _opening(row))), asked.counts
    if row.answer is None:
        raise InvalidRequestError("A cascade is judged by the weak tier's answer: add a column weak_response.")
    view = _view(asked.text, row)
    answered = answered or Answered.of(row.answer)
    checks = answer_checks(view, asked.mentioned, answered.parts)
    parts = (asked.measures, checks, step_checks(asked.given, row.answer, answered.steps))
    return np.concatenate((*parts, signals(view)) if row.signals else parts), asked.counts


def remembered(row: GradedRow) -> Features:
    """What experience keeps of a judged answer with token signals: as `vector` of a cascade, and its opening behind."""
    measures, counts = vector(row, "cascade")
    return np.concatenate((measures, _opening(row))), counts


def recalled(rows: TextRows) -> dict[Mode, TextRows]:
    """What each gate reads of `remembered` rows. There is no opening in those of earlier versions."""
    modes: dict[Mode, Array] = {"prompt": rows.measures[:, :N_WORDING], "cascade": rows.measures[:, :N_CASCADE]}
    if rows.measures.shape[1] > N_CASCADE:
        modes["opening"] = np.hstack((rows.measures[:, :N_WORDING], rows.measures[:, N_CASCADE:]))
    return {mode: TextRows(rows.counts, measures) for mode, measures in modes.items()}


def go_on(rows: TextRows) -> Bools:
    """(n,) which `remembered` answers go on behind their opening."""
    return np.expm1(rows.measures[:, _TOKENS_WRITTEN]) > OPENING_TOKENS + 0.5


def has_opening(row: GradedRow) -> bool:
    """Whether the answer goes on behind its opening: one that has ended is judged as a whole."""
    return row.signals is not None and len(row.signals.logprobs) > OPENING_TOKENS


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


def _opening(row: GradedRow) -> Array:
    if row.signals is None:
        raise InvalidRequestError("An answer's opening is judged by token signals: add logprobs, entropies, margins.")
    return signals(_view("", row), OPENING_TOKENS)


def _view(question: str, row: GradedRow) -> RunView:
    told = row.signals or AnswerSignals(_EMPTY, _EMPTY, _EMPTY)
    series = told.logprobs, told.entropies, told.margins
    return RunView(PromptView(question), row.answer or "", *series, _EMPTY, _EMPTY, None, finish_reason="")
