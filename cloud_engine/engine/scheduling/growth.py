"""Predicted growth of running answers, so that the scheduler admits no request that soon costs a preemption.

Imports no torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..types.request_state import RequestState

Floats = NDArray[np.float64]

_ANSWERS = 256  # latest answers whose lengths predict those of running ones
#: Numbers of steps ahead for which growth is predicted.
_AHEAD = np.unique(np.rint(2.0 ** np.arange(0, 17, 0.5)))
_USUAL_TOKENS = 128  # without any answer to learn from, half of all answers get this many tokens
_DEVIATIONS = 1.0  # standard deviations of the growth to add to its mean


class AnswerLengths:
    """The lengths of the latest answers."""

    def __init__(self) -> None:
        self.latest = deque[tuple[int, bool]](maxlen=_ANSWERS)  # length, and whether the model ended the answer

    def add(self, state: RequestState) -> None:
        """Record an answer that has ended. If `max_tokens` ended it, it might have become longer."""
        self.latest.append((state.num_generated_tokens, state.num_remaining_tokens > 0))


class GrowthForecast:
    """The expected growth of running answers: each grows by one token per step, and frees its blocks when it ends."""

    def __init__(self, lengths: AnswerLengths, running: Sequence[RequestState], block_size: int) -> None:
        """Predict lengths from those of earlier answers, and from those that running ones have reached so far."""
        known = sorted([*lengths.latest, *((state.num_generated_tokens, False) for state in running)])
        self._lengths, ended = np.array(known, float).reshape(-1, 2).T
        # Kaplan-Meier estimate: the share of answers that are longer than the first 0, 1, 2 ... of the sorted lengths.
        self._survival = np.cumprod(np.append(1.0, 1 - ended / np.arange(len(known), 0, -1)))
        self._block_size = block_size
        self._num_answers, self._growth = 0, np.zeros((3, len(_AHEAD)))
        if running:
            self.add(running)

    def add(self, states: Sequence[RequestState]) -> None:
        """Add requests that start to run."""
        self._num_answers += len(states)
        self._growth = self._growth + self._growth_of(states)

    def peak_with(self, state: RequestState) -> int:
        """Return how many more blocks than now all answers and that of `state` will probably occupy at most."""
        return math.ceil(max(0.0, np.max(self._needed_with(state))))

    def repays_preemption(self, state: RequestState, num_free: int, fixed_rows: float) -> bool:
        """Return whether `state` should start now, even if it is preempted when the `num_free` blocks run out.

        Until then, it saves its share of each step's fixed cost, which is that of `fixed_rows` rows. Afterwards, its
        tokens are computed again."""
        num_tokens = len(state.token_ids)
        exceeding = self._needed_with(state) > num_free - -(-num_tokens // self._block_size)
        steps = float(_AHEAD[np.argmax(exceeding)]) if np.any(exceeding) else _AHEAD[-1]
        return steps * fixed_rows >= (self._num_answers + 1) * (num_tokens + steps)

    def _needed_with(self, state: RequestState) -> Floats:
        """Return how many more blocks than now the answers and that of `state` will probably occupy, at `_AHEAD`."""
        mean, variance, most = self._growth + self._growth_of([state])
        return np.minimum(mean + _DEVIATIONS * np.sqrt(variance), most)

    def _growth_of(self, states: Sequence[RequestState]) -> Floats:
        """Return mean, variance and maximum (3, times) of the growth of `states` in blocks, for each of `_AHEAD`."""
        sizes = [(len(state.token_ids), state.num_generated_tokens, state.num_remaining_tokens) for state in states]
        tokens, generated, remaining = np.array(sizes, float).T[:, :, None]
        held, then = np.ceil(tokens / self._block_size), np.ceil((tokens + _AHEAD) / self._block_size)
        may_run = remaining >= _AHEAD
        share = self._share_longer(generated, generated + _AHEAD) * may_run
        parts = share * then - held, share * (1 - share) * then**2, may_run * (then - held)
        return np.array([np.sum(part, axis=0) for part in parts])

    def _share_longer(self, now: Floats, later: Floats) -> Floats:
        """Return the share of answers of length `now` that reach the length `later`.

        The prior knowledge, that half of all answers get `_USUAL_TOKENS` and that long ones double, counts like one
        answer."""
        begun = np.searchsorted(self._lengths, now, "right")
        number = len(self._lengths) - begun
        longer = self._survival[np.searchsorted(self._lengths, later, "left")]
        share = np.divide(longer, self._survival[begun], out=np.zeros_like(later), where=number > 0)
        return (number * share + (now + _USUAL_TOKENS) / (later + _USUAL_TOKENS)) / (number + 1)
