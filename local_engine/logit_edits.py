"""Penalties, biases and bans of one answer, kept up to date token by token.

The meaning is `protocol.sampling.logit_edits`, which makes the same anew for every token: on a prompt of thousands of
tokens under a repetition penalty that would be most of a small model's step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from ..protocol.sampling import SamplingParams
from .noise import Floats


class LogitEditor:
    """Edits rows of logits for one answer, which may only grow from call to call."""

    def __init__(
        self, params: SamplingParams, vocab_size: int, prompt_ids: Sequence[int], end_ids: Iterable[int]
    ) -> None:
        self._params = params
        self._end_ids = np.array(sorted(end_ids), np.intp)
        self._counts = Counter[int]()
        self._num_seen = 0
        self._divisors = np.ones(vocab_size, np.float32)
        self._bias = np.zeros(vocab_size, np.float64)
        self._offsets = np.zeros(vocab_size, np.float64)
        for token, bias in params.logit_bias:
            self._bias[token] = self._offsets[token] = bias
        edited = {token for token, _ in params.logit_bias}
        if params.repetition_penalty != 1:
            edited.update(prompt_ids)
            self._divisors[list(prompt_ids)] = params.repetition_penalty
        self._edited = edited
        self._ids = np.array(sorted(edited), np.intp)

    def edited(self, logits: Floats, answer: Sequence[int]) -> Floats:
        """A copy of `logits` (vocab,) with what applies to the token after `answer`."""
        for token in answer[self._num_seen :]:
            self._see(token)
        self._num_seen = len(answer)
        logits = logits.copy()
        found, divisors = logits[self._ids], self._divisors[self._ids]
        offsets = self._offsets[self._ids].astype(np.float32)
        logits[self._ids] = np.where(found > 0, found / divisors, found * divisors) + offsets
        if len(answer) < self._params.min_tokens:
            logits[self._end_ids] = -np.inf
        return logits

    def _see(self, token: int) -> None:
        params = self._params
        self._counts[token] += 1
        self._divisors[token] = params.repetition_penalty
        penalty = params.frequency_penalty * self._counts[token]
        self._offsets[token] = self._bias[token] - penalty - params.presence_penalty
        if token not in self._edited:
            self._edited.add(token)
            self._ids = np.append(self._ids, token)
