"""Log-probabilities of prompt tokens, computed chunk by chunk so that only one step's logits are held at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..types.outputs import PromptLogprob
from ..types.slot_state import SlotState
from .host_device_copy import HostCopy, to_device
from .sampler import UnreadLogprobs


class UnreadPromptScores:
    """Log-probabilities of prompt tokens that the device may still be computing."""

    def __init__(self, state: SlotState, logits: Tensor) -> None:
        """Look up the next prompt tokens of `state` that have no log-probabilities yet, one per row of `logits`."""
        begin = state.num_scored_tokens + 1  # the first token has no log-probability
        tokens = to_device(torch.tensor(state.token_ids[begin : begin + len(logits)]), logits.device)
        state.num_scored_tokens += len(logits)
        self._scores = UnreadLogprobs(logits, tokens, state.sequence.params.prompt_logprobs or 0)
        self._ranks = HostCopy((logits > logits.gather(1, tokens[:, None])).sum(dim=-1) + 1)

    def read(self) -> list[PromptLogprob]:
        """Return the log-probabilities. Waits for this lookup only."""
        ranks: list[int] = self._ranks.tolist()
        return [
            PromptLogprob(score.logprob, score.top, rank)
            for score, rank in zip(self._scores.read(), ranks, strict=True)
        ]


def score_prompts(batch: Sequence[SlotState], logits: Tensor) -> tuple[Tensor, dict[int, UnreadPromptScores]]:
    """Look up the log-probabilities of prompt tokens in `logits` (rows, vocab), without waiting for the device.

    Returns the other rows of `logits`, from which new tokens are sampled, and the log-probabilities by slot.
    """
    scores: dict[int, UnreadPromptScores] = {}
    if all(state.sequence.num_scored_tokens is None for state in batch):
        return logits, scores
    left: list[Tensor] = []
    row = 0
    for state in batch:
        first = row + state.num_prompt_scores
        end = first + state.num_samples
        if first > row:
            scores[state.sequence.slot] = UnreadPromptScores(state, logits[row:first])
        left.append(logits[first:end])
        row = end
    return torch.cat(left), scores
