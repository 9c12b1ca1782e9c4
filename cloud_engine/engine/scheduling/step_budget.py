"""The tokens that fit into a step of limited length: between two steps streams move and aborts are obeyed.

No torch here, and no clock: whoever measures reports.
"""

from __future__ import annotations

from ..types.recent import Recent

_MIN_TOKENS = 64  # also while nothing is known; fewer would be slow where a step takes long whatever is in it


class StepBudget:
    """`limit_s`: what a step may take; None for as long as it wants. `least`: tokens of prompts that have to fit.

    A token to be verified takes longer than one of a prompt: the model's head reads it too. So both are measured.
    """

    def __init__(self, limit_s: float | None, least: int = 1) -> None:
        self._limit_s = limit_s
        self._least = max(least, _MIN_TOKENS)
        self._prompt_s, self._draft_s = Recent(), Recent()  # per token

    def max_prompt_tokens(self, budget: int) -> int:
        """Of `budget` that there are."""
        return budget if self._limit_s is None else min(budget, self._fitting_prompts(self._limit_s))

    def max_draft_tokens(self, budget: int, prompt_tokens: int) -> int:
        """Of `budget` that there are, in a step with as many tokens of prompts."""
        if self._limit_s is None:
            return budget
        left = 1 - prompt_tokens / self._fitting_prompts(self._limit_s)
        return min(budget, int(left * max(_MIN_TOKENS, _fitting(self._limit_s, self._draft_s))))

    def observe(self, prompt_tokens: int, draft_tokens: int, sequences: int, step_s: float) -> None:
        """A step of `step_s`, most of it prompts or drafts: what it took for everything else counts as theirs."""
        tokens = prompt_tokens + draft_tokens
        if self._limit_s is not None and 2 * tokens >= max(sequences, self._least):
            taken = self._draft_s if draft_tokens > prompt_tokens else self._prompt_s
            taken.add(step_s / tokens)

    def _fitting_prompts(self, limit_s: float) -> int:
        return max(self._least, _fitting(limit_s, self._prompt_s))


def _fitting(limit_s: float, token_s: Recent) -> int:
    return int(limit_s / token_s.median) if token_s.is_reliable else 0
