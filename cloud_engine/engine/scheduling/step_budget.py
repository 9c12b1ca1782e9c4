"""Token budgets that keep steps within a target time, so that streams and aborts never wait long, and their medians.

Imports no torch and reads no clock: callers report their measurements.
"""

from __future__ import annotations

from collections import deque

_REMEMBERED = 5  # measurements of which the median is taken
_MIN_TOKENS = 64  # lower bound, as smaller chunks waste a step's fixed cost; also used until there are measurements


class RecentMedian:
    """The lower median of the last few measurements, so that single outliers do not count.

    It is reliable from the second measurement on.
    """

    __slots__ = ("_values", "median")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_REMEMBERED)
        self.median = 0.0

    def add(self, value: float) -> None:
        self._values.append(value)
        self.median = sorted(self._values)[(len(self._values) - 1) // 2]

    @property
    def is_reliable(self) -> bool:
        return len(self._values) > 1


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
