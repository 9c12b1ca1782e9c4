"""Whether a prediction is verified whole at once, or a few tokens of it go ahead: by which is likely to take less time.

Whole, one that fails at once costs the tokens behind its first few for nothing; a few at first, one that holds takes a
step more. What tokens and steps cost depends on the model and the machine: on a GPU a step outweighs many of them, on a
CPU few. No clock here: whoever measures reports.
"""

from __future__ import annotations

from collections import deque

from .step_costs import StepCosts, StepReport

_REMEMBERED = 32
_PRIOR, _PRIOR_WEIGHT = 0.75, 4  # share of predictions that hold, while few have been seen
_TRUSTED_SHARE = 0.75  # is enough while nothing is known about the costs


class PredictionTrust:
    """Learns from predictions and from steps, in which predicted tokens count as those of a prompt."""

    def __init__(self) -> None:
        self.is_asked = False  # else there is no use in observing
        self._held: deque[bool] = deque(maxlen=_REMEMBERED)
        self._costs = StepCosts()

    def add(self, held: bool) -> None:
        """The first few tokens of a prediction held, or they did not."""
        self._held.append(held)

    def observe(self, step: StepReport) -> None:
        self._costs.observe(step)

    def takes_whole(self, num_behind: int, sequences: int) -> bool:
        """Whether to verify the `num_behind` tokens behind a prediction's first few before these have held.

        They delay everybody in a batch of so many `sequences`; a step more costs the request's share of it.
        """
        self.is_asked = True
        share = (sum(self._held) + _PRIOR * _PRIOR_WEIGHT) / (len(self._held) + _PRIOR_WEIGHT)
        step_s, token_s = self._costs.plain_s(sequences), self._costs.prompt_token_s
        if step_s is None or not token_s:
            return share >= _TRUSTED_SHARE
        return share * step_s / sequences >= (1 - share) * num_behind * token_s
