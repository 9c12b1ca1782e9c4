"""Log-probabilities of prompt tokens, computed chunk by chunk so that only one step's logits are held at a time."""

# torch leaves `Tensor.tolist` untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..types.outputs import PromptLogprob
from ..types.request_state import ScheduledRequest
from .host_device_copy import HostCopy, to_device
from .sampler import log_probabilities


def score_prompts(batch: Sequence[ScheduledRequest], logits: Tensor) -> Tensor:
    """Append the log-probabilities of prompt tokens, computed from `logits` (rows, vocab), to each request's state.

    Returns the other rows of `logits`, from which new tokens are sampled.
    """
    if not any(item.num_prompt_scores for item in batch):
        return logits
    left: list[Tensor] = []
    row = 0
    for item in batch:
        first = row + item.num_prompt_scores
        end = first + item.num_samples
        if first > row:
            item.state.prompt_logprobs += _scores(item, logits[row:first])
        left.append(logits[first:end])
        row = end
    return torch.cat(left)


def _scores(item: ScheduledRequest, logits: Tensor) -> list[PromptLogprob]:
    """Return log-probabilities for the next prompt tokens that have none yet."""
    state = item.state
    begin = len(state.prompt_logprobs) + 1  # the first token has no log-probability
    tokens = state.token_ids[begin : begin + len(logits)]
    scores = log_probabilities(logits, tokens, state.request.params.prompt_logprobs or 0)
    chosen = logits.gather(1, to_device(torch.tensor(tokens), logits.device)[:, None])
    ranks: list[int] = HostCopy((logits > chosen).sum(dim=-1) + 1).tolist()
    return [PromptLogprob(score.logprob, score.top, rank) for score, rank in zip(scores, ranks, strict=True)]
