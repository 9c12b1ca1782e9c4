"""Sampling parameters and logit edits of a batch as tensors, and checks that kernels can read these tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..runtime.numeric import cdiv

TOKEN_BITS = 20
#: Number of token ids that fit in a rank.
MAX_TOKENS = 2**TOKEN_BITS
#: Minimum of all ranks; as a threshold, it keeps everything.
LOWEST_RANK = -(2 ** (31 + TOKEN_BITS))


@dataclass(frozen=True, slots=True)
class Truncation:
    """Parameters (rows,) that exclude unlikely tokens, in the order in which they apply after the temperature. None
    disables a parameter in all rows. The likeliest token is always kept."""

    # int32; 0 is off.
    top_k: Tensor | None = None
    # float64; 1 is off.
    top_p: Tensor | None = None
    # float64; 0 is off.
    min_p: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of each row of logits. All tensors are on the device of the logits."""

    # (rows,) float64; 0 is greedy.
    temperatures: Tensor
    # (rows,) int64.
    seeds: Tensor
    # (rows,) int64: position in its sequence of the token to sample.
    positions: Tensor
    # None if no row is truncated.
    truncation: Truncation | None = None
    # (rows, ceil(vocab / 32)) int32: one bit per token id, lowest first, 1 if allowed. None if no row has a grammar.
    mask: Tensor | None = None
    # (rows,) float64; 1 is off. None if off for all rows. Applied after the truncation.
    typical_p: Tensor | None = None

    def of(self, rows: Tensor | slice) -> Sampling:
        """Return the sampling parameters of a subset of rows, given by their indices."""
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
        """Return the same parameters for the token that is `tokens` positions later."""
        return replace(self, positions=self.positions + tokens)


class LogitRows(NamedTuple):
    """Logits (rows, vocab), with the temperatures and the mask of `Sampling`."""

    logits: Tensor
    temperatures: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class FlatEdits:
    """Penalties, biases and bans of a batch as a flat list (`text/logit_edits.py`), each token once per row."""

    # (edits,) int32. Edits of row -1 do nothing and reserve space in a captured graph.
    rows: Tensor
    # (edits,) int32.
    token_ids: Tensor
    # (edits,) float32: divisor of positive logits, factor of negative ones.
    divisors: Tensor
    # (edits,) float32, added after the division or multiplication.
    offsets: Tensor


class TopLogprobs(NamedTuple):
    """Log-probabilities of the chosen token and of the most likely tokens."""

    # (rows,) float32.
    chosen: Tensor
    # (rows, n) float32, largest first.
    values: Tensor
    # (rows, n) int64.
    ids: Tensor


def check_sampling(logits: Tensor, sampling: Sampling) -> None:
    """Raise ConfigurationError if the kernels cannot read the tensors."""
    rows, vocabulary = logits.shape
    if logits.stride(1) != 1 or not logits.is_floating_point() or not 1 <= vocabulary <= MAX_TOKENS:
        raise ConfigurationError(f"Logits must be dense rows of 1 to {MAX_TOKENS} floats, got {tuple(logits.shape)}.")
    check_column("temperatures", sampling.temperatures, rows, torch.float64)
    check_column("seeds", sampling.seeds, rows, torch.int64)
    check_column("positions", sampling.positions, rows, torch.int64)
    if sampling.typical_p is not None:
        check_column("typical_p", sampling.typical_p, rows, torch.float64)
    if sampling.truncation is not None:
        check_truncation(sampling.truncation, rows)
    mask, words = sampling.mask, cdiv(vocabulary, 32)
    if mask is not None and (mask.shape != (rows, words) or mask.dtype != torch.int32 or not mask.is_contiguous()):
        raise ConfigurationError(f"mask must be ({rows}, {words}) int32, one bit for each of {vocabulary} tokens.")


def check_truncation(truncation: Truncation, rows: int) -> None:
    """Raise ConfigurationError unless each column has contiguous values of its type, one per row."""
    dtypes = {"top_k": torch.int32, "top_p": torch.float64, "min_p": torch.float64}
    for name, dtype in dtypes.items():
        values: Tensor | None = getattr(truncation, name)
        if values is not None:
            check_column(name, values, rows, dtype)


def check_column(name: str, values: Tensor, rows: int, dtype: torch.dtype) -> None:
    """Raise ConfigurationError unless the values are contiguous, of this type, and one per row."""
    if values.shape != (rows,) or values.dtype != dtype or not values.is_contiguous():
        raise ConfigurationError(
            f"{name} must be contiguous ({rows},) {dtype}, got {tuple(values.shape)} {values.dtype}."
        )


def _at(column: Tensor | None, rows: Tensor | slice) -> Tensor | None:
    return None if column is None else column[rows]
