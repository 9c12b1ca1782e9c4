"""Sampling on a CUDA device: parameters of all rows in one copy, then kernels. The tokens are those of `sampler`."""

# torch leaves `from_numpy` and `tolist` untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...kernels.logit_edits import FlatEdits, apply_edits_
from ...kernels.sampling import Sampling
from ...kernels.sampling import sample as sample_rows
from ...kernels.truncation import Truncation

if TYPE_CHECKING:
    from .sampler import SamplingRow

_WORD = 2**64


def can_sample(rows: Sequence[SamplingRow]) -> bool:
    """Typical-p keeps tokens from the middle of the order: there is no kernel for that."""
    return all(row.params.typical_p >= 1 for row in rows)


def sample_on_device(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """A token per row of `logits` (rows, vocab) float32, which stay as they are. Waits for the device once, at the end.

    Edits of tokens that a mask forbids change nothing, so it does not matter that the mask comes after them.
    """
    edited = [index for index, row in enumerate(rows) if row.edits]
    if edited:
        logits = logits.clone()
        apply_edits_(logits, _edits(rows, edited, logits.device))
    return sample_rows(logits, _sampling(rows, logits)).tolist()


def _sampling(rows: Sequence[SamplingRow], logits: Tensor) -> Sampling:
    columns = np.empty((6, len(rows)), dtype=np.int64)
    columns[0] = np.array([row.temperature for row in rows], dtype=np.float64).view(np.int64)
    columns[1] = np.array([row.seed % _WORD for row in rows], dtype=np.uint64).view(np.int64)
    columns[2] = [row.position for row in rows]
    columns[3] = [row.params.top_k for row in rows]
    columns[4] = np.array([row.params.top_p for row in rows], dtype=np.float64).view(np.int64)
    columns[5] = np.array([row.params.min_p for row in rows], dtype=np.float64).view(np.int64)
    temperatures, seeds, positions, top_k, top_p, min_p = _on(logits.device, torch.from_numpy(columns)).unbind()
    params = [row.params for row in rows]
    truncation = Truncation(
        top_k.to(torch.int32) if any(one.top_k > 0 for one in params) else None,
        top_p.view(torch.float64) if any(one.top_p < 1 for one in params) else None,
        min_p.view(torch.float64) if any(one.min_p > 0 for one in params) else None,
    )
    return Sampling(
        temperatures.view(torch.float64),
        seeds,
        positions,
        truncation if any(one.truncates for one in params) else None,
        _mask(rows, logits),
    )


def _mask(rows: Sequence[SamplingRow], logits: Tensor) -> Tensor | None:
    if all(row.mask is None for row in rows):
        return None
    words = np.full((len(rows), -(-logits.shape[1] // 32)), -1, dtype=np.int32)
    for index, row in enumerate(rows):
        if row.mask is not None:
            words[index] = row.mask[: words.shape[1]]
    return _on(logits.device, torch.from_numpy(words))


def _edits(rows: Sequence[SamplingRow], edited: Sequence[int], device: torch.device) -> FlatEdits:
    edits = [(index, edit) for index in edited if (edit := rows[index].edits) is not None]
    columns = np.empty((4, sum(len(edit.token_ids) for _, edit in edits)), dtype=np.int32)
    columns[0] = [index for index, edit in edits for _ in edit.token_ids]
    columns[1] = [token for _, edit in edits for token in edit.token_ids]
    columns[2] = np.array([divisor for _, edit in edits for divisor in edit.divisors], dtype=np.float32).view(np.int32)
    columns[3] = np.array([offset for _, edit in edits for offset in edit.offsets], dtype=np.float32).view(np.int32)
    indices, token_ids, divisors, offsets = _on(device, torch.from_numpy(columns)).unbind()
    return FlatEdits(indices, token_ids, divisors.view(torch.float32), offsets.view(torch.float32))


def _on(device: torch.device, staged: Tensor) -> Tensor:
    """Through pinned memory, so that the host does not wait for the copy."""
    return staged.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else staged
