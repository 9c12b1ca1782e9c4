"""Sampling of tokens and log-probabilities from logits.

Sampling is Gumbel-max: argmax(logits / temperature + noise) draws from softmax(logits / temperature). The noise of a
token depends only on the request's seed, the token's position and its id. So a seed gives the same tokens whatever
else is in the batch. A draft token is accepted exactly if it is the token that would have been sampled: with equal
logits, the output with a draft equals the output without one. Logits may differ in their last bits between batches.

This module packs the options of all rows into columns that one copy sends to the device; `kernels/sampling` samples.
"""

# torch leaves `from_numpy` and `tolist` untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.attention.ragged_batch import Ints
from ....kernels.runtime.transfer import HostCopy, to_device
from ....kernels.sampling.ops import MAX_TOP_LOGPROBS, apply_edits_, stable_topk
from ....kernels.sampling.ops import log_probabilities as top_log_probabilities
from ....kernels.sampling.ops import sample as sample_rows
from ....kernels.sampling.types import FlatEdits, Sampling, Truncation
from ....protocol.sampling import MIN_TEMPERATURE, WORD, ResolvedParams
from ....text.grammars.state import Mask
from ....text.logit_edits import LogitEdits
from ..types.outputs import TokenLogprob

#: Number of rows of `packed_options`.
OPTIONS = 6


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The sampling parameters of rows of logits."""

    # (OPTIONS, rows): the rows' `packed_options`.
    options: Ints
    # (rows,): positions of the tokens to sample, counted from the start of each sequence.
    positions: Ints
    # Grammar masks and logit edits by row, for rows that have any.
    masks: Mapping[int, Mask] = field(default_factory=dict[int, Mask])
    edits: Mapping[int, LogitEdits] = field(default_factory=dict[int, LogitEdits])

    @property
    def are_plain(self) -> NDArray[np.bool_]:
        """Return (rows,): whether each row has no logit edits, no grammar mask and no typical_p."""
        plain = self.options[5].view(np.float64) >= 1
        plain[[*self.masks, *self.edits]] = False
        return plain

    def continued(self, rows: Sequence[int], tokens: int = 0) -> SamplingRows:
        """Return plain `rows`, given by their indices, for the token that is `tokens` positions later."""
        return SamplingRows(self.options[:, rows], self.positions[rows] + tokens)


def packed_options(params: Sequence[ResolvedParams], seeds: Sequence[int]) -> Ints:
    """Return the sampling options of sequences (OPTIONS, sequences): the bits of the temperature, the seed, top_k, and
    the bits of top_p, min_p and typical_p."""
    packed = np.empty((OPTIONS, len(params)), np.int64)
    packed[0] = _bits([one.temperature for one in params])
    packed[1] = np.array([seed % WORD for seed in seeds], dtype=np.uint64).view(np.int64)
    packed[2] = [one.top_k for one in params]
    packed[3] = _bits([one.top_p for one in params])
    packed[4] = _bits([one.min_p for one in params])
    packed[5] = _bits([one.typical_p for one in params])
    return packed


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Sample one token per row of `logits` (rows, vocab) float32, into (rows,) int64 on the same device.

    Rows at temperature 0 take the argmax. Does not modify `logits` and does not wait for the device.
    """
    if rows.edits:  # edits may come before the mask: editing a masked token has no effect
        logits = logits.clone()
        apply_edits_(logits, _flat(rows.edits, logits.device))
    if not logits.is_cuda and not rows.masks and (rows.options[0].view(np.float64) < MIN_TEMPERATURE).all():
        return logits.argmax(dim=-1)
    return sample_rows(logits, sampling_of(rows, logits.shape[1], logits.device))


def log_probabilities(logits: Tensor, chosen: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Return raw log-probabilities of each row's chosen token and `num_top` top tokens. Waits for the device once."""
    return UnreadLogprobs(logits, to_device(torch.tensor(chosen), logits.device), num_top).read()


class UnreadLogprobs:
    """Log-probabilities that the device may still be computing."""

    def __init__(self, logits: Tensor, chosen: Tensor, num_top: int) -> None:
        """Look up each row's `chosen` token (rows,) and `num_top` top tokens, without waiting for the device."""
        self._num_top = min(num_top, logits.shape[1])
        self._columns = HostCopy(_scores(logits, chosen, self._num_top))

    def read(self) -> list[TokenLogprob]:
        """Return the raw log-probabilities of each row. Waits for this lookup only."""
        num_top = self._num_top
        return [
            TokenLogprob(logprob, tuple(zip(map(int, rest[:num_top]), rest[num_top:], strict=True)))
            for logprob, *rest in self._columns.tolist()
        ]


def _scores(logits: Tensor, chosen: Tensor, num_top: int) -> Tensor:
    """Return one tensor to copy, (rows, 1 + 2 * num_top) float64: the chosen token's score, the top ids and scores."""
    if logits.is_cuda and num_top <= MAX_TOP_LOGPROBS:
        picked, values, ids = top_log_probabilities(logits, chosen, num_top)
    else:  # top-k avoids sorting the whole vocabulary
        logprobs = logits.log_softmax(dim=-1)
        values, ids = stable_topk(logprobs, num_top)
        picked = logprobs.gather(1, chosen[:, None]).flatten()
    return torch.cat((picked[:, None].double(), ids.double(), values.double()), dim=1)


def sampling_of(rows: SamplingRows, vocabulary: int, device: torch.device) -> Sampling:
    """Pack the sampling parameters of all rows, except logit edits, into columns on `device`."""
    number = len(rows.positions)
    staged, columns = _columns(OPTIONS + 1, number, np.int64)
    columns[:OPTIONS], columns[OPTIONS] = rows.options, rows.positions
    temperatures, seeds, top_k, *shares, positions = to_device(staged, device)[:, :number].unbind()
    top_p, min_p, typical_p = (share.view(torch.float64) for share in shares)
    masses, least_shares, typical_shares = rows.options[3:].view(np.float64)
    by_rank, by_mass, by_share = (rows.options[2] > 0).any(), (masses < 1).any(), (least_shares > 0).any()
    truncation = Truncation(
        top_k.to(torch.int32) if by_rank else None, top_p if by_mass else None, min_p if by_share else None
    )
    return Sampling(
        temperatures.view(torch.float64),
        seeds,
        positions,
        truncation if by_rank or by_mass or by_share else None,
        _mask(rows, vocabulary, device),
        typical_p if (typical_shares < 1).any() else None,
    )


def _columns(number: int, length: int, dtype: type[np.generic]) -> tuple[Tensor, np.ndarray[Any, Any]]:
    """Return a host tensor, and a view of its `number` columns of `length` elements.

    Columns are aligned to 16 bytes, because Triton compiles a separate kernel for unaligned ones."""
    aligned = 16 // np.dtype(dtype).itemsize
    whole = np.zeros((number, -(-length // aligned) * aligned), dtype=dtype)
    return torch.from_numpy(whole), whole[:, :length]


def _bits(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.float64).view(np.int64)


def _mask(rows: SamplingRows, vocabulary: int, device: torch.device) -> Tensor | None:
    if not rows.masks:
        return None
    words = np.full((len(rows.positions), -(-vocabulary // 32)), -1, dtype=np.int32)
    for index, mask in rows.masks.items():
        words[index] = mask[: words.shape[1]]
    return to_device(torch.from_numpy(words), device)


def _flat(edits: Mapping[int, LogitEdits], device: torch.device) -> FlatEdits:
    """Flatten the edits of all rows, each with its row index."""
    indices = np.repeat(list(edits), [len(edit.token_ids) for edit in edits.values()])
    staged, columns = _columns(4, len(indices), np.int32)
    columns[0] = indices
    columns[1] = np.concatenate([edit.token_ids for edit in edits.values()])
    columns[2] = np.concatenate([edit.divisors for edit in edits.values()]).view(np.int32)
    columns[3] = np.concatenate([edit.offsets for edit in edits.values()]).view(np.int32)
    rows, token_ids, divisors, offsets = to_device(staged, device)[:, : len(indices)].unbind()
    return FlatEdits(rows, token_ids, divisors.view(torch.float32), offsets.view(torch.float32))
