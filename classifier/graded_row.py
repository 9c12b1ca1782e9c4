"""A graded prompt: both tiers' scores, and the available data on the weak tier's run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..protocol.requests import Message
from .arrays import Array, Bools, Floats


@dataclass(frozen=True, slots=True)
class AnswerSignals:
    """Signals of the n tokens of the weak model's answer, in nats."""

    # (n,) log-probability of the token.
    logprobs: Array
    # (n,) entropy of each token's distribution.
    entropies: Array
    # (n,) log-probability of the token minus that of the runner-up.
    margins: Array


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Data on a run that only Updraft's engines report: hidden states and prompt log-probabilities."""

    # (m,) log-probability of each prompt token.
    prompt_logprobs: Array
    # (hidden size,) hidden state at the last prompt token.
    prompt_hidden: Array
    # (hidden size,) hidden state at the last answer token.
    answer_hidden: Array
    # "stop" or "length".
    finish_reason: str


@dataclass(frozen=True, slots=True)
class GradedRow:
    """A prompt with the scores of both tiers."""

    prompt: str
    # Score of the weak tier, in [0, 1].
    weak: float
    # Score of the strong tier, in [0, 1].
    strong: float
    # Label that groups rows in reports; not used as a feature.
    domain: str = ""
    # The weak tier's answer.
    answer: str | None = None
    # The weak tier's token signals.
    signals: AnswerSignals | None = None
    # Prompt tokens as the strong tier counts them.
    cloud_read: float | None = None
    # Answer tokens as the strong tier counts them.
    cloud_written: float | None = None
    # The weak tier's hidden states, prompt log-probabilities and finish reason.
    states: ModelStates | None = None
    # Label that groups the rows of a domain by phrasing; not used as a feature.
    family: str = ""
    # Conversation that ends with the prompt; None if all rows of the file are single prompts.
    messages: tuple[Message, ...] | None = None

    @property
    def gain(self) -> bool:
        """Return whether the strong tier scored higher."""
        return self.strong > self.weak


def scores(rows: Sequence[GradedRow]) -> tuple[Floats, Floats]:
    """Return the weak and the strong scores, (n,) each."""
    return np.array([row.weak for row in rows], np.float64), np.array([row.strong for row in rows], np.float64)


def gains(rows: Sequence[GradedRow]) -> Bools:
    """Return for each row, (n,), whether the strong tier scored higher."""
    return np.array([row.gain for row in rows], np.bool_)
