"""The choice between verifying a request's predicted output at once and probing its first tokens, by expected time.

Verifying a whole prediction wastes most tokens if the prediction fails early. Probing costs an extra step if it holds.
Costs depend on model and machine: a step costs as much as many tokens on a GPU, but few on a CPU. Callers report the
measured times.
"""

from __future__ import annotations

from collections import deque

from .step_costs import StepCosts, StepReport

_REMEMBERED = 32
_PRIOR, _PRIOR_WEIGHT = 0.75, 4  # initial share of correct predictions, and its weight in predictions
_TRUSTED_SHARE = 0.75  # minimum share of correct predictions to verify whole ones while costs are unknown


class PredictionTrust:
    """Learns how often predictions are correct, and what steps cost. Predicted tokens cost as much as prompt tokens."""

    def __init__(self) -> None:
        self.is_asked = False  # whether `takes_whole` was called; before that, `observe` is useless
        self._held: deque[bool] = deque(maxlen=_REMEMBERED)
        self._costs = StepCosts()

    def add(self, held: bool) -> None:
        """Record whether the first few tokens of a prediction were accepted."""
        self._held.append(held)

    def observe(self, step: StepReport) -> None:
        self._costs.observe(step)

    def takes_whole(self, num_further: int, sequences: int) -> bool:
        """Return whether to verify a prediction's first tokens and the `num_further` tokens after them in one step.

        Verifying the further tokens delays the whole batch. An extra step delays only this request, which is
        one of the batch's `sequences`.
        """
        self.is_asked = True
        share = (sum(self._held) + _PRIOR * _PRIOR_WEIGHT) / (len(self._held) + _PRIOR_WEIGHT)
        step_s, token_s = self._costs.plain_s(sequences), self._costs.prompt_token_s
        if step_s is None or not token_s:
            return share >= _TRUSTED_SHARE
        return share * step_s / sequences >= (1 - share) * num_further * token_s
