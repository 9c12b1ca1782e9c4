"""Penalties, biases and bans: what requests change in the logits of single tokens before one is chosen.

The edits of a batch are one flat list. What they are made of is said in `text/logit_edits.py` (`LogitEdits`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..runtime.backend import uses_triton


@dataclass(frozen=True, slots=True)
class FlatEdits:
    """Each (edits,): `rows` and `token_ids` int32, `divisors` and `offsets` float32. No token comes twice in a row.

    Entries with row -1 do nothing, so that a captured graph has room for edits to come.
    """

    rows: Tensor
    token_ids: Tensor
    divisors: Tensor
    offsets: Tensor


def apply_edits_(logits: Tensor, edits: FlatEdits) -> None:
    """Divide positive logits by the divisor and multiply others, then add the offset: in place, (rows, vocab) float32.

    Log-probabilities are reported of the logits before this: take them first, or edit a copy.
    """
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ConfigurationError("apply_edits_: logits must be dense rows of float32.")
    if uses_triton(logits):
        from .triton_logit_edits import launch_edits

        launch_edits(logits, edits)
    else:
        reference_edits_(logits, edits)


def reference_edits_(logits: Tensor, edits: FlatEdits) -> None:
    real = edits.rows >= 0
    places = edits.rows[real].long(), edits.token_ids[real].long()
    found, divisors = logits[places], edits.divisors[real]
    logits[places] = torch.where(found > 0, found / divisors, found * divisors) + edits.offsets[real]
