"""Products with quantized weights in plain torch: the reference for the kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..runtime.numeric import FP8_MAX
from .types import ALIGNMENT, FP8, SMALLEST_SCALE, QuantizedWeight

_NUMBERS_AT_ONCE = 2**22  # maximum dequantized weights in memory


def quantized_linear_reference(hidden: Tensor, weight: QuantizedWeight) -> Tensor:
    """Return the product with the dequantized weight. Activations stay unquantized, even with FP8 weights.

    Few features are dequantized at a time, so the memory is that of the quantized weight. The activations must be in
    the weight's `order`.
    """
    features, inputs = weight.shape
    at_once = max(1, _NUMBERS_AT_ONCE // inputs)
    starts = range(0, features, at_once)
    parts = (weight.rows(slice(start, start + at_once)).dequantized() for start in starts)
    return torch.cat([functional.linear(hidden, part.to(hidden.dtype)) for part in parts], dim=1)


def quantize_tokens_reference(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return `hidden` (tokens, inputs) as FP8, its inputs padded to a multiple of 16, and a float32 scale per token."""
    wide = hidden.float()
    scale = wide.abs().amax(dim=1).clamp(min=SMALLEST_SCALE) / FP8_MAX
    data = functional.pad(wide / scale[:, None], (0, -hidden.shape[1] % ALIGNMENT))
    return data.clamp(-FP8_MAX, FP8_MAX).to(FP8), scale
