"""Signals of the model's confidence in a token, from its row of raw logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .truncation import largest

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenSignals:
    """Confidence in one token, in nats, from the raw distribution: before temperature and truncation."""

    # Log-probability of the chosen token.
    logprob: float
    # Entropy of the whole distribution.
    entropy: float
    # Log-probability of the most likely token minus that of the second most likely.
    margin: float


@dataclass(frozen=True, slots=True)
class RowMeasure:
    """Measures of a row of logits. `token`: the (first) most likely token; `log_total`: log of sum(exp(logit))."""

    logits: Floats
    token: int
    log_total: float
    entropy: float
    margin: float

    @property
    def is_finite(self) -> bool:
        """Return whether the logits are free of NaN and positive infinity, which only damaged models produce."""
        return math.isfinite(self.log_total)

    def signals(self, token: int) -> TokenSignals:
        return TokenSignals(self.logprob(token), self.entropy, self.margin)

    def logprob(self, token: int) -> float:
        return float(self.logits[token]) - self.log_total

    def top(self, count: int) -> tuple[tuple[int, float], ...]:
        """Return the `count` most likely tokens with their log-probabilities, best first."""
        tokens = largest(self.logits, count)
        return tuple((int(token), self.logprob(int(token))) for token in tokens)


def log_softmax(logits: Floats) -> Floats:
    """Return the log-probabilities of rows of logits (n, vocab), float32 (n, vocab)."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def token_logprobs(logits: Floats, tokens: npt.NDArray[np.intp]) -> Floats:
    """Return the log-probabilities of `tokens` (n,) under rows of `logits` (n, vocab), float32 (n,)."""
    highest = logits.max(axis=1, keepdims=True)
    totals = np.log(np.exp(logits - highest).sum(axis=1))
    return logits[np.arange(len(tokens)), tokens] - highest[:, 0] - totals
