"""Top-k, top-p and min-p without sorting: each comes down to the least token that is kept.

A token's *rank* is a 64-bit integer that orders a row as a stable descending sort does: a larger logit has a larger
rank, and of equal logits the lower token id has. What top-k, top-p and min-p keep is a prefix of that order, hence
"all ranks from a threshold on", and the strictest of the three thresholds is the one that counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ...protocol.sampling import LEAST_TEMPERATURE
from ..runtime.backend import uses_triton

TOKEN_BITS = 20
#: Token ids a rank has room for.
MOST_TOKENS = 2**TOKEN_BITS
#: No rank is below this: as a threshold it keeps everything.
LOWEST_RANK = -(2 ** (31 + TOKEN_BITS))


@dataclass(frozen=True, slots=True)
class Truncation:
    """Each (rows,): `top_k` int32, 0 is off; `top_p` float64, 1 is off; `min_p` float64, 0 is off.

    None where it is off for all rows. Applied in this order, behind the temperature. One token always stays.
    """

    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None


class Rows(NamedTuple):
    """Logits (rows, vocab) with what is done to them first; see `Sampling`."""

    logits: Tensor
    temperatures: Tensor
    mask: Tensor | None


def thresholds(rows: Rows, truncation: Truncation) -> Tensor:
    """The least rank each row keeps, (rows,) int64. Greedy rows keep everything."""
    check_truncation(truncation, len(rows.logits))
    if uses_triton(rows.logits):
        from .triton_truncation import launch_thresholds

        return launch_thresholds(rows, truncation)
    return reference_thresholds(rows, truncation)


def reference_thresholds(rows: Rows, truncation: Truncation) -> Tensor:
    """The definition by sorting. A token is kept if its rank in the order is below k, if the probability before it is
    below p, and if its own is at least min-p of the largest."""
    logits = masked(rows.logits, rows.mask)
    ordered, order = ranks(logits).sort(dim=-1, descending=True)
    random = rows.temperatures >= LEAST_TEMPERATURE
    scaled = logits.gather(1, order).double() / torch.where(random, rows.temperatures, 1.0)[:, None]
    outside = torch.zeros_like(ordered, dtype=torch.bool)
    if truncation.top_k is not None:
        top_k = truncation.top_k[:, None]
        outside |= (torch.arange(ordered.shape[1], device=ordered.device) >= top_k) & (top_k > 0)
    probabilities = scaled.masked_fill(outside, -torch.inf).softmax(dim=-1)
    if truncation.top_p is not None:
        top_p = truncation.top_p[:, None]
        outside |= (probabilities.cumsum(dim=-1) - probabilities >= top_p) & (top_p < 1)
    if truncation.min_p is not None:
        outside |= probabilities < truncation.min_p[:, None] * probabilities[:, :1]
    outside[:, 0] = False
    least = ordered.masked_fill(outside, torch.iinfo(torch.int64).max).amin(dim=-1)
    return torch.where(random, least, LOWEST_RANK)


def check_truncation(truncation: Truncation, rows: int) -> None:
    """Raises ConfigurationError unless each column has a dense value of its type for each row."""
    wanted = {"top_k": torch.int32, "top_p": torch.float64, "min_p": torch.float64}
    for name, dtype in wanted.items():
        values: Tensor | None = getattr(truncation, name)
        if values is not None:
            check_column(name, values, rows, dtype)


def check_column(name: str, values: Tensor, rows: int, dtype: torch.dtype) -> None:
    """Raises ConfigurationError unless these are dense values of this type, one for each row."""
    if values.shape != (rows,) or values.dtype != dtype or not values.is_contiguous():
        raise ConfigurationError(
            f"{name} must be dense values ({rows},) {dtype}, got {tuple(values.shape)} {values.dtype}."
        )


def ranks(logits: Tensor) -> Tensor:
    """The ranks of float32 logits (rows, vocab), int64.

    The bits of a float, read as an integer, order positive floats upwards and negative ones downwards; turning round
    the negative ones gives one order for all. Both zeros are one.
    """
    bits = (logits + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    return (ordered.long() << TOKEN_BITS) + (MOST_TOKENS - 1 - tokens)


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """The logits in float32, -inf where the mask has no bit."""
    logits = logits.float()
    if mask is None:
        return logits
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
