"""Whether a prediction is verified whole at once, or a few tokens of it go ahead: by which is likely to take less time.

Whole, one that fails at once costs the tokens behind its first few for nothing; a few at first, one that holds takes a
step more. What tokens and steps cost depends on the model and the machine: on a GPU a step outweighs many of
them, on a CPU few. No clock here: whoever measures reports.
"""

from __future__ import annotations

from collections import deque

from .step_costs import Recent

_REMEMBERED = 32
_PRIOR, _PRIOR_WEIGHT = 0.75, 4  # share of predictions that hold, while few have been seen
_TRUSTED_SHARE = 0.75  # is enough while nothing is known about the costs
_MANY_TOKENS = 16  # in a step tell what one costs


class PredictionTrust:
    """Learns from predictions and from steps."""

    def __init__(self) -> None:
        self.is_asked = False  # else there is no use in observing
        self._held: deque[bool] = deque(maxlen=_REMEMBERED)
        self._step_s, self._token_s = Recent(), Recent()  # of a sequence without drafts; of one more token in a step

    def add(self, held: bool) -> None:
        """The first few tokens of a prediction held, or they did not."""
        self._held.append(held)

    def observe(self, sequences: int, more_tokens: int, step_s: float) -> None:
        """A step of so many seconds, in which the target computed `more_tokens` than one for each sequence."""
        if more_tokens == 0:
            self._step_s.add(step_s / sequences)
        elif more_tokens >= _MANY_TOKENS and self._step_s.is_sure:
            self._token_s.add(max(0.0, step_s - sequences * self._step_s.median) / more_tokens)

    def takes_whole(self, num_behind: int) -> bool:
        """Whether to verify the `num_behind` tokens behind a prediction's first few before these have held."""
        self.is_asked = True
        share = (sum(self._held) + _PRIOR * _PRIOR_WEIGHT) / (len(self._held) + _PRIOR_WEIGHT)
        if not self._token_s.is_sure:
            return share >= _TRUSTED_SHARE
        return share * self._step_s.median >= (1 - share) * num_behind * self._token_s.median
