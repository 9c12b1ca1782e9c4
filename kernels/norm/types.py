"""Parameters of a norm, shared by all implementations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """Parameters of one RMSNorm. The weight follows Llama's convention, or Gemma's with `unit_offset`."""

    # (size,) in the dtype of the rows.
    weight: Tensor
    eps: float
    # Whether the weight is stored minus one.
    unit_offset: bool = False
