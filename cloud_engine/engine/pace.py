"""How many tokens of prompts fit into a step of limited length: between two steps streams move and aborts are obeyed.

No torch here, and no clock: whoever measures reports.
"""

from __future__ import annotations

from .step_costs import Recent

_LEAST_TOKENS = 64  # also while nothing is known; fewer would be slow where a step takes long whatever is in it


class Pace:
    """`limit_s`: what a step with prompts may take; None for as long as they want. `least`: tokens that have to fit."""

    def __init__(self, limit_s: float | None, least: int = 1) -> None:
        self._limit_s = limit_s
        self._least = max(least, _LEAST_TOKENS)
        self._token_s = Recent()

    def most_tokens(self, budget: int) -> int:
        """Of a step's prompts, of `budget` that there are."""
        if self._limit_s is None:
            return budget
        fitting = int(self._limit_s / self._token_s.median) if self._token_s.is_sure else 0
        return min(budget, max(self._least, fitting))

    def observe(self, prompt_tokens: int, sequences: int, step_s: float) -> None:
        """A step of `step_s`, of which prompts were most: what it took for everything else counts as theirs."""
        if self._limit_s is not None and 2 * prompt_tokens >= max(sequences, self._least):
            self._token_s.add(step_s / prompt_tokens)
