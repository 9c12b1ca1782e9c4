"""Log-probabilities of prompt tokens, computed chunk by chunk so that only one step's logits are held at a time."""

# torch leaves `Tensor.tolist` untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..types.outputs import PromptLogprob
from ..types.slot_state import SlotState
from .host_device_copy import HostCopy, to_device
from .sampler import log_probabilities


def score_prompts(batch: Sequence[SlotState], logits: Tensor) -> tuple[Tensor, dict[int, list[PromptLogprob]]]:
    """Compute the log-probabilities of prompt tokens from `logits` (rows, vocab).

    Returns the other rows of `logits`, from which new tokens are sampled, and the log-probabilities by slot.
    """
    scores: dict[int, list[PromptLogprob]] = {}
    if all(state.sequence.num_scored_tokens is None for state in batch):
        return logits, scores
    left: list[Tensor] = []
    row = 0
    for state in batch:
        first = row + state.num_prompt_scores
        end = first + state.num_samples
        if first > row:
            scores[state.sequence.slot] = _scores(state, logits[row:first])
        left.append(logits[first:end])
        row = end
    return torch.cat(left), scores


def _scores(state: SlotState, logits: Tensor) -> list[PromptLogprob]:
    """Return log-probabilities for the next prompt tokens that have none yet."""
    begin = state.num_scored_tokens + 1  # the first token has no log-probability
    tokens = state.token_ids[begin : begin + len(logits)]
    state.num_scored_tokens += len(logits)
    scores = log_probabilities(logits, tokens, state.sequence.params.prompt_logprobs or 0)
    chosen = logits.gather(1, to_device(torch.tensor(tokens), logits.device)[:, None])
    ranks: list[int] = HostCopy((logits > chosen).sum(dim=-1) + 1).tolist()
    return [PromptLogprob(score.logprob, score.top, rank) for score, rank in zip(scores, ranks, strict=True)]
