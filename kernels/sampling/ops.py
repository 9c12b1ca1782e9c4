"""Sampling on every device: edits, temperature, truncation, grammar masks, choice of a token, log-probabilities.

Uses the Gumbel-max trick. With equal noise and precision, a seed gives the same token on CPU, GPU, and in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ...protocol.sampling import MIN_TEMPERATURE
from ..runtime.backend import uses_native, uses_triton
from .cpu import native_sample
from .reference import apply_edits_reference_, log_probabilities_reference, sample_reference, thresholds_reference
from .types import FlatEdits, LogitRows, Sampling, TopLogprobs, Truncation, check_sampling, check_truncation

#: Maximum number of tokens with reported log-probabilities.
MAX_TOP_LOGPROBS = 20


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return a token for each row of `logits` (rows, vocab), float32, bfloat16 or float16: (rows,) int64.

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
    """Return the lowest rank (see `reference`) that each row keeps, (rows,) int64; None if no row is truncated."""
    if sampling.truncation is None:
        return None
    return thresholds(LogitRows(logits, sampling.temperatures, sampling.mask), sampling.truncation)


def thresholds(rows: LogitRows, truncation: Truncation) -> Tensor:
    """Return the lowest rank (see `reference`) that each row keeps, (rows,) int64. Greedy rows keep everything."""
    check_truncation(truncation, len(rows.logits))
    if uses_triton(rows.logits):
        from .triton_truncation import launch_thresholds

        return launch_thresholds(rows, truncation)
    return thresholds_reference(rows, truncation)


def log_probabilities(logits: Tensor, chosen: Tensor, num_top: int) -> TopLogprobs:
    """Return raw log-probabilities of the `chosen` tokens (rows,) int64 and of the `num_top` likeliest tokens.

    Equally likely tokens are ordered by id, lower first.
    """
    if not 0 <= num_top <= min(MAX_TOP_LOGPROBS, logits.shape[1]):
        raise ConfigurationError(f"At most {MAX_TOP_LOGPROBS} log-probabilities can be reported, got {num_top}.")
    if uses_triton(logits):
        from .triton_probabilities import launch_log_probabilities

        return launch_log_probabilities(logits, chosen, num_top)
    return log_probabilities_reference(logits, chosen, num_top)


def stable_topk(logprobs: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Return values and ids (rows, num_top) of the largest entries of (rows, vocab); among equals, lower ids first.

    The choice of `topk` among equals depends on the number requested, and so on other requests in the batch. On a GPU,
    the whole row is sorted, because searching for equals would wait for the GPU. On a CPU, searching is faster.
    """
    if num_top == 0:
        return logprobs[:, :0], torch.empty_like(logprobs[:, :0], dtype=torch.int64)
    if logprobs.is_cuda:
        values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
        return values[:, :num_top], ids[:, :num_top]
    values, ids = logprobs.topk(min(num_top + 1, logprobs.shape[1]), dim=-1)
    if not (values[:, 1:] == values[:, :-1]).any():
        return values[:, :num_top], ids[:, :num_top]
    if values.shape[1] > num_top:
        least = values[:, num_top - 1]
        for row in (least == values[:, num_top]).nonzero().flatten():  # `topk` left out tokens equal to the least
            rising = (logprobs[row] >= least[row]).nonzero().flatten()
            ids[row, :num_top] = rising[logprobs[row, rising].argsort(descending=True, stable=True)[:num_top]]
    ids = ids[:, :num_top].sort(dim=-1).values
    values, order = logprobs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def apply_edits_(logits: Tensor, edits: FlatEdits) -> None:
    """Edit `logits` (rows, vocab) float32 in place: divide positive logits, multiply others, then add the offset.

    Reported log-probabilities refer to the unedited logits: compute them first, or edit a copy.
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ConfigurationError("apply_edits_: logits must be contiguous float32 rows.")
    if uses_triton(logits):
        from .triton_logit_edits import launch_edits

        launch_edits(logits, edits)
    else:
        apply_edits_reference_(logits, edits)


def _native_or_reference(logits: Tensor, sampling: Sampling) -> Tensor:
    """Sample in C; use the reference for rows with typical-p and rows whose choice depends on rounding."""
    chosen = native_sample(logits, sampling)
    if sampling.typical_p is not None:
        chosen[(sampling.typical_p < 1) & (sampling.temperatures >= MIN_TEMPERATURE)] = -1
    unsampled = (chosen < 0).nonzero().flatten()
    if len(unsampled):
        chosen[unsampled] = sample_reference(logits[unsampled], sampling.of(unsampled))
    return chosen
