"""From logits to tokens on every device: temperature, truncation, a grammar's mask, noise that depends on no batch.

Sampling is Gumbel-max, with the same noise and scores of the same precision everywhere: a seed gives the same token on
a CPU and on a GPU. Truncation is a threshold on ranks (see `truncation.py`) but for typical-p (see `typical.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ...protocol.sampling import LEAST_TEMPERATURE
from ..runtime.backend import uses_triton
from .cpu import can_sample, native_sample
from .noise import gumbel_noise, noise_keys
from .reference import MOST_TOKENS, Rows, Truncation, check_column, check_truncation, masked, ranks, thresholds
from .typical import typical_logits


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample each row of logits; all tensors are on their device.

    `temperatures` (rows,) float64, 0 is greedy; `seeds` and `positions` (rows,) int64, the position being the index in
    its sequence of the token to be sampled; `truncation` None if no row has any. `mask` (rows, ceil(vocab / 32)) int32:
    one bit per token id, lowest bit first, may it be chosen; None if no row has a grammar (-1 is a word of a row that
    has none). `typical_p` (rows,) float64, 1 is off and None off for all rows: it comes behind the truncation.
    """

    temperatures: Tensor
    seeds: Tensor
    positions: Tensor
    truncation: Truncation | None = None
    mask: Tensor | None = None
    typical_p: Tensor | None = None

    def of(self, rows: Tensor | slice) -> Sampling:
        """That of some of the rows, given by their indices."""
        cut = self.truncation
        return Sampling(
            self.temperatures[rows],
            self.seeds[rows],
            self.positions[rows],
            None if cut is None else Truncation(_at(cut.top_k, rows), _at(cut.top_p, rows), _at(cut.min_p, rows)),
            _at(self.mask, rows),
            _at(self.typical_p, rows),
        )

    def ahead(self, tokens: int) -> Sampling:
        """That of as many tokens further on."""
        return replace(self, positions=self.positions + tokens)


def sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """A token for each row of `logits` (rows, vocab), float32, bfloat16 or float16: (rows,) int64.

    Where all logits are -inf it is token 0. Ties go to the lowest token id.
    """
    check_sampling(logits, sampling)
    if uses_triton(logits) and sampling.typical_p is None:
        from .triton import launch_sample

        return launch_sample(logits, sampling, row_thresholds(logits, sampling))
    if can_sample(logits):
        return _native_or_plain(logits, sampling)
    return reference_sample(logits, sampling)


def _native_or_plain(logits: Tensor, sampling: Sampling) -> Tensor:
    """In C, but for what it leaves open: typical-p, and what depends on how a sum or a logarithm is rounded."""
    chosen = native_sample(logits, sampling)
    if sampling.typical_p is not None:
        chosen[(sampling.typical_p < 1) & (sampling.temperatures >= LEAST_TEMPERATURE)] = -1
    left = (chosen < 0).nonzero().flatten()
    if len(left):
        chosen[left] = reference_sample(logits[left], sampling.of(left))
    return chosen


def row_thresholds(logits: Tensor, sampling: Sampling) -> Tensor | None:
    """The least rank that each row keeps, (rows,) int64; None if no row is truncated."""
    if sampling.truncation is None:
        return None
    return thresholds(Rows(logits, sampling.temperatures, sampling.mask), sampling.truncation)


def reference_sample(logits: Tensor, sampling: Sampling) -> Tensor:
    logits = kept_logits(logits, sampling)
    keys = noise_keys(sampling.seeds, sampling.positions)
    random = sampling.temperatures >= LEAST_TEMPERATURE
    temperatures = torch.where(random, sampling.temperatures, 1.0)[:, None]
    noise = torch.where(random[:, None], gumbel_noise(keys, logits.shape[1]), 0.0)
    return (logits.double() / temperatures + noise).argmax(dim=-1)


def kept_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """A copy in float32 with -inf for all that mask, truncation and typical-p take out, in plain torch."""
    logits = masked(logits, sampling.mask)
    threshold = row_thresholds(logits, sampling)
    if threshold is not None:
        logits = logits.masked_fill(ranks(logits) < threshold[:, None], -torch.inf)
    if sampling.typical_p is not None:
        logits = typical_logits(logits, sampling.temperatures, sampling.typical_p)
    return logits


def check_sampling(logits: Tensor, sampling: Sampling) -> None:
    """Raises ConfigurationError for what the kernels cannot read."""
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1 or not logits.is_floating_point() or not 1 <= vocabulary <= MOST_TOKENS:
        raise ConfigurationError(f"Logits must be dense rows of 1 to {MOST_TOKENS} floats, got {tuple(logits.shape)}.")
    check_column("temperatures", sampling.temperatures, rows, torch.float64)
    check_column("seeds", sampling.seeds, rows, torch.int64)
    check_column("positions", sampling.positions, rows, torch.int64)
    if sampling.typical_p is not None:
        check_column("typical_p", sampling.typical_p, rows, torch.float64)
    if sampling.truncation is not None:
        check_truncation(sampling.truncation, rows)
    mask, words = sampling.mask, -(-vocabulary // 32)
    if mask is not None and (mask.shape != (rows, words) or mask.dtype != torch.int32 or not mask.is_contiguous()):
        raise ConfigurationError(f"mask must be ({rows}, {words}) int32, a bit for each of {vocabulary} tokens.")


def _at(column: Tensor | None, rows: Tensor | slice) -> Tensor | None:
    return None if column is None else column[rows]
