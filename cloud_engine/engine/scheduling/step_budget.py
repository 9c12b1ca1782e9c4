"""Token budgets that keep steps within a target time, so that streams and aborts never wait long.

Imports no torch and reads no clock: callers report their measurements.
"""

from __future__ import annotations

from ..types.recent_median import RecentMedian

_MIN_TOKENS = 64  # lower bound, as smaller chunks waste a step's fixed cost; also used until there are measurements


class StepBudget:
    """Token budgets for a target step time of `limit_s` seconds (None: no limit); `least` prompt tokens always fit.

    Draft tokens and prompt tokens are measured separately, because only draft tokens pass the model's output layer.
    """

    def __init__(self, limit_s: float | None, least: int = 1) -> None:
        self._limit_s = limit_s
        self._least = max(least, _MIN_TOKENS)
        self._prompt_s, self._draft_s = RecentMedian(), RecentMedian()  # seconds per token

    def max_prompt_tokens(self, budget: int) -> int:
        """Return how many prompt tokens of `budget` fit into a step."""
        return budget if self._limit_s is None else min(budget, self._fitting_prompts(self._limit_s))

    def max_draft_tokens(self, budget: int, prompt_tokens: int) -> int:
        """Return how many draft tokens of `budget` fit into a step that has `prompt_tokens` already."""
        if self._limit_s is None:
            return budget
        left = 1 - prompt_tokens / self._fitting_prompts(self._limit_s)
        return min(budget, int(left * max(_MIN_TOKENS, _fitting(self._limit_s, self._draft_s))))

    def observe(self, prompt_tokens: int, draft_tokens: int, sequences: int, step_s: float) -> None:
        """Learn the time per token from a step, if most of its time is due to prompt tokens or to draft tokens."""
        tokens = prompt_tokens + draft_tokens
        if self._limit_s is not None and 2 * tokens >= max(sequences, self._least):
            taken = self._draft_s if draft_tokens > prompt_tokens else self._prompt_s
            taken.add(step_s / tokens)

    def _fitting_prompts(self, limit_s: float) -> int:
        return max(self._least, _fitting(limit_s, self._prompt_s))


def _fitting(limit_s: float, token_s: RecentMedian) -> int:
    return int(limit_s / token_s.median) if token_s.is_reliable else 0
