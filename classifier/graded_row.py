"""A graded prompt: what the weak and the strong tier scored on it, and what is known of the weak tier's run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..protocol.requests import Message
from .arrays import Array, Bools, Floats


@dataclass(frozen=True, slots=True)
class AnswerSignals:
    """The weak model's report of each of the n tokens of its answer, in nats."""

    # (n,) log-probability of the token.
    logprobs: Array
    # (n,) entropy of its distribution.
    entropies: Array
    # (n,) its log-probability less that of the runner-up.
    margins: Array


@dataclass(frozen=True, slots=True)
class ModelStates:
    """The states of a run that only an engine of ours reports."""

    # (m,) log-probability of each prompt token.
    prompt_logprobs: Array
    # (hidden size,) at the last token of the prompt.
    prompt_hidden: Array
    # (hidden size,) at the last token of the answer.
    answer_hidden: Array
    # "stop" or "length".
    finish_reason: str


@dataclass(frozen=True, slots=True)
class GradedRow:
    """One prompt and what both tiers scored on it."""

    prompt: str
    # Score of the weak tier, in [0, 1].
    weak: float
    # Score of the strong tier, in [0, 1].
    strong: float
    # Groups rows in reports; not a feature.
    domain: str = ""
    # The weak tier's answer.
    answer: str | None = None
    # The weak tier's token signals.
    signals: AnswerSignals | None = None
    # Prompt tokens as the strong tier counts them.
    cloud_read: float | None = None
    # Answer tokens as the strong tier counts them.
    cloud_written: float | None = None
    # The weak tier's hidden states and what comes with them.
    states: ModelStates | None = None
    # Groups rows of a domain by their phrasing; not a feature.
    family: str = ""
    # The conversation whose last question the prompt is; None where the rows are prompts alone.
    messages: tuple[Message, ...] | None = None

    @property
    def gain(self) -> bool:
        """Whether the strong tier's answer is better."""
        return self.strong > self.weak


def scores(rows: Sequence[GradedRow]) -> tuple[Floats, Floats]:
    """The weak and the strong scores, (n,) each."""
    return np.array([row.weak for row in rows], np.float64), np.array([row.strong for row in rows], np.float64)


def gains(rows: Sequence[GradedRow]) -> Bools:
    """(n,) where the strong tier is better."""
    return np.array([row.gain for row in rows], np.bool_)
