"""From one row of logits to a token, and to the numbers that say how sure the model was."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..protocol.sampling import LEAST_TEMPERATURE, LogitEdits, SamplingParams

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenSignals:
    """How sure the model was of one token, in nats, from the raw distribution: before temperature and truncation.

    `logprob`: of the chosen token; `entropy`: of the whole distribution; `margin`: log-probability of the most likely
    token minus that of the second.
    """

    logprob: float
    entropy: float
    margin: float


class Distribution:
    """One row of logits (vocab,) float32, normalised once."""

    def __init__(self, logits: Floats) -> None:
        self.logits = logits
        self._shifted = np.maximum(logits - logits.max(), np.float32(-1e4))  # -inf would turn 0 * log 0 into NaN
        weights = np.exp(self._shifted)
        total = weights.sum()
        self._log_total = float(np.log(total))
        self._entropy = self._log_total - float(weights @ self._shifted) / float(total)

    def signals(self, token: int) -> TokenSignals:
        second, first = np.partition(self.logits, -2)[-2:]
        return TokenSignals(self.logprob(token), self._entropy, float(first - second))

    def logprob(self, token: int) -> float:
        return float(self._shifted[token]) - self._log_total

    def top(self, count: int) -> tuple[tuple[int, float], ...]:
        """The `count` most likely tokens with their log-probabilities, best first."""
        count = min(count, len(self.logits))
        best = np.argpartition(self.logits, -count)[-count:] if count else np.empty(0, np.intp)
        ordered = best[np.argsort(-self.logits[best], kind="stable")]
        return tuple((int(token), self.logprob(int(token))) for token in ordered)


def token_logprobs(logits: Floats, tokens: npt.NDArray[np.intp]) -> Floats:
    """Log-probability of `tokens` (n,) under rows of `logits` (n, vocab), float32 (n,)."""
    highest = logits.max(axis=1, keepdims=True)
    totals = np.log(np.exp(logits - highest).sum(axis=1))
    return logits[np.arange(len(tokens)), tokens] - highest[:, 0] - totals


class Sampler:
    """Chooses tokens by one request's parameters; the same seed and logits give the same tokens."""

    def __init__(self, params: SamplingParams, default_temperature: float) -> None:
        self._params = params
        self._temperature = default_temperature if params.temperature is None else params.temperature
        self._random = np.random.default_rng(None if params.seed is None else params.seed % 2**64)

    def choose(self, logits: Floats, edits: LogitEdits | None = None) -> int:
        """Greedy at temperature 0, else a draw after temperature, top-k, top-p, min-p and typical-p, in that order."""
        if edits is not None:
            logits = _edited(logits, edits)
        if self._temperature < LEAST_TEMPERATURE:
            return int(logits.argmax())
        candidates = _top_k(logits, self._params.top_k)
        scaled = logits[candidates].astype(np.float64) / self._temperature
        probabilities = np.exp(scaled - scaled.max())
        probabilities /= probabilities.sum()
        if self._params.top_p < 1 or self._params.min_p > 0:
            order = np.argsort(-probabilities, kind="stable")
            candidates, probabilities = candidates[order], probabilities[order]
            before = np.cumsum(probabilities) - probabilities
            kept = before < self._params.top_p  # the token that crosses top_p is still in
            kept &= probabilities >= self._params.min_p * probabilities[0]
            candidates, probabilities = candidates[kept], probabilities[kept] / probabilities[kept].sum()
        if self._params.typical_p < 1:
            kept = _typical(probabilities, self._params.typical_p)
            candidates, probabilities = candidates[kept], probabilities[kept] / probabilities[kept].sum()
        point = self._random.random()
        chosen = int(np.searchsorted(np.cumsum(probabilities), point, side="right"))
        return int(candidates[min(chosen, len(candidates) - 1)])


def _edited(logits: Floats, edits: LogitEdits) -> Floats:
    """A copy with penalties, biases and bans applied."""
    logits = logits.copy()
    found, divisors = logits[edits.token_ids], np.array(edits.divisors, np.float32)
    logits[edits.token_ids] = np.where(found > 0, found / divisors, found * divisors) + np.array(
        edits.offsets, np.float32
    )
    return logits


def _typical(probabilities: npt.NDArray[np.float64], typical_p: float) -> npt.NDArray[np.bool_]:
    """Which tokens make up the `typical_p` mass of those whose surprise is nearest to the distribution's entropy."""
    surprise = -np.log(np.maximum(probabilities, 1e-300))
    order = np.argsort(np.abs(surprise - probabilities @ surprise), kind="stable")
    ordered = probabilities[order]
    kept = np.zeros(len(probabilities), np.bool_)
    kept[order[np.cumsum(ordered) - ordered < typical_p]] = True
    return kept


def _top_k(logits: Floats, top_k: int) -> npt.NDArray[np.intp]:
    """Ids of the `top_k` largest logits in ascending order of id; all of them for 0."""
    if not 0 < top_k < len(logits):
        return np.arange(len(logits))
    return np.sort(np.argpartition(logits, -top_k)[-top_k:])
