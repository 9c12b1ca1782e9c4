"""From logits to tokens on every device: edits, temperature, truncation, a grammar's mask, sampling, log-probabilities.

Sampling is Gumbel-max. Noise and precision are the same everywhere: a seed gives the same token on a CPU and on a GPU,
and in every batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ...protocol.sampling import MIN_TEMPERATURE
from ..runtime.backend import uses_native, uses_triton
from .cpu import native_sample
from .reference import (
    apply_edits_reference_,
    log_probabilities_reference,
    sample_reference,
    thresholds_reference,
)
from .types import FlatEdits, LogitRows, Sampling, TopLogprobs, Truncation, check_sampling, check_truncation

#: The most tokens whose log-probabilities are reported.
MAX_TOP_LOGPROBS = 20


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """A token for each row of `logits` (rows, vocab), float32, bfloat16 or float16: (rows,) int64.

    Ties go to the lowest token id. Rows of -inf give token 0.
    """
    check_sampling(logits, sampling)
    if uses_triton(logits) and sampling.typical_p is None:
        from .triton import launch_sample

        return launch_sample(logits, sampling, row_thresholds(logits, sampling))
    if uses_native(logits):
        return _native_or_reference(logits, sampling)
    return sample_reference(logits, sampling)


def row_thresholds(logits: Tensor, sampling: Sampling) -> Tensor | None:
    """The least rank that each row keeps, (rows,) int64; None if no row is truncated."""
    if sampling.truncation is None:
        return None
    return thresholds(LogitRows(logits, sampling.temperatures, sampling.mask), sampling.truncation)


def thresholds(rows: LogitRows, truncation: Truncation) -> Tensor:
    """The least rank each row keeps, (rows,) int64. Greedy rows keep everything."""
    check_truncation(truncation, len(rows.logits))
    if uses_triton(rows.logits):
        from .triton_truncation import launch_thresholds

        return launch_thresholds(rows, truncation)
    return thresholds_reference(rows, truncation)


def log_probabilities(logits: Tensor, chosen: Tensor, num_top: int) -> TopLogprobs:
    """Log-probabilities in the raw distribution, of the `chosen` tokens (rows,) int64 and the `num_top` likeliest.

    Of equally likely tokens the lower id comes first.
    """
    if not 0 <= num_top <= min(MAX_TOP_LOGPROBS, logits.shape[1]):
        raise ConfigurationError(f"At most {MAX_TOP_LOGPROBS} tokens are reported, and {num_top} were asked for.")
    if uses_triton(logits):
        from .triton_probabilities import launch_log_probabilities

        return launch_log_probabilities(logits, chosen, num_top)
    return log_probabilities_reference(logits, chosen, num_top)


def stable_topk(logprobs: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Values and ids (rows, num_top) of the largest of (rows, vocab), of equals the lower id first.

    Which of equal values `topk` takes depends on how many it is asked for, and so on other requests in the batch. A
    device sorts the whole row, because looking for equals would wait for it. On the host looking is faster.
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


def apply_edits_(logits: Tensor, edits: FlatEdits) -> None:
    """Divide positive logits by the divisor and multiply others, then add the offset: in place, (rows, vocab) float32.

    Reported log-probabilities are of the logits before: take them first, or edit a copy.
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ConfigurationError("apply_edits_: logits must be dense rows of float32.")
    if uses_triton(logits):
        from .triton_logit_edits import launch_edits

        launch_edits(logits, edits)
    else:
        apply_edits_reference_(logits, edits)


def _native_or_reference(logits: Tensor, sampling: Sampling) -> Tensor:
    """In C, but for rows with typical-p and rows whose choice depends on the rounding of a sum or a logarithm."""
    chosen = native_sample(logits, sampling)
    if sampling.typical_p is not None:
        chosen[(sampling.typical_p < 1) & (sampling.temperatures >= MIN_TEMPERATURE)] = -1
    left = (chosen < 0).nonzero().flatten()
    if len(left):
        chosen[left] = sample_reference(logits[left], sampling.of(left))
    return chosen
