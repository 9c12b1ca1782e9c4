"""The parameters of a norm, which every implementation takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """One RMSNorm. The weight's convention is Llama's, or Gemma's with `unit_offset` (see `reference`)."""

    # (size,) in the dtype of the rows.
    weight: Tensor
    eps: float
    # The weight is stored less one.
    unit_offset: bool = False
