"""Probabilities of tokens: of all that a row may sample, and the logarithms of those that an answer reports."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ...protocol.sampling import LEAST_TEMPERATURE
from ..runtime.backend import uses_triton
from .ops import Sampling, check_sampling, kept_logits, row_thresholds

MOST_REPORTED = 20


class TopLogprobs(NamedTuple):
    """Of the chosen token (rows,) float32; of the likeliest ones, in that order: `values` (rows, n), `ids` int64."""

    chosen: Tensor
    values: Tensor
    ids: Tensor


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What `sample` draws from: (rows, vocab) float32. All of a greedy row is on its first largest token."""
    check_sampling(logits, sampling)
    if uses_triton(logits) and sampling.typical_p is None:
        from .triton_probabilities import launch_probabilities

        return launch_probabilities(logits, sampling, row_thresholds(logits, sampling))
    return reference_probabilities(logits, sampling)


def log_probabilities(logits: Tensor, chosen: Tensor, num_top: int) -> TopLogprobs:
    """Of the raw distribution: of the `chosen` tokens (rows,) int64 and of the `num_top` likeliest, at most 20.

    Of equally likely tokens the lower id comes first.
    """
    if not 0 <= num_top <= min(MOST_REPORTED, logits.shape[1]):
        raise ConfigurationError(f"At most {MOST_REPORTED} tokens are reported, and {num_top} were asked for.")
    if uses_triton(logits):
        from .triton_probabilities import launch_log_probabilities

        return launch_log_probabilities(logits, chosen, num_top)
    return reference_log_probabilities(logits, chosen, num_top)


def reference_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    logits = kept_logits(logits, sampling).double()
    random = sampling.temperatures >= LEAST_TEMPERATURE
    drawn = (logits / torch.where(random, sampling.temperatures, 1.0)[:, None]).softmax(dim=-1)
    greedy = torch.zeros_like(drawn).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(random[:, None], drawn, greedy).float()


def likeliest(logprobs: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Values and ids (rows, num_top) of the largest of (rows, vocab), of equals the lower id first.

    What `topk` takes of equals depends on how many it is asked for, and so on what others in the batch want. A device
    sorts all of the row, so as not to be waited for; on the host that would take longer than looking for equals.
    """
    if num_top == 0:
        return logprobs[:, :0], torch.empty_like(logprobs[:, :0], dtype=torch.int64)
    if logprobs.is_cuda:
        values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
        return values[:, :num_top], ids[:, :num_top]
    values, ids = logprobs.topk(min(num_top + 1, logprobs.shape[1]), dim=-1)
    if values.shape[1] > num_top:
        least = values[:, num_top - 1]
        for row in (least == values[:, num_top]).nonzero().flatten():  # some of the least are left out
            rising = (logprobs[row] >= least[row]).nonzero().flatten()
            ids[row, :num_top] = rising[logprobs[row, rising].argsort(descending=True, stable=True)[:num_top]]
    ids = ids[:, :num_top].sort(dim=-1).values
    values, order = logprobs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def reference_log_probabilities(logits: Tensor, chosen: Tensor, num_top: int) -> TopLogprobs:
    logprobs = logits.float().log_softmax(dim=-1)
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    picked = logprobs.gather(1, chosen[:, None]).flatten()
    return TopLogprobs(picked, values[:, :num_top].contiguous(), ids[:, :num_top].contiguous())
