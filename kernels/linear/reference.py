"""Products with quantised weights in plain torch: the definition that the kernels are checked against."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ..runtime.numeric import FP8_MAX
from .types import ALIGNMENT, FP8, SMALLEST_SCALE, QuantizedWeight


def quantized_linear_reference(hidden: Tensor, weight: QuantizedWeight) -> Tensor:
    """The product with the dequantised weight. Activations stay as they are, with FP8 weights, too."""
    return functional.linear(hidden, weight.dequantized().to(hidden.dtype))


def quantize_tokens_reference(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """`hidden` (tokens, inputs) as FP8, its inputs padded to a multiple of 16, and a float32 scale for each token."""
    wide = hidden.float()
    scale = wide.abs().amax(dim=1).clamp(min=SMALLEST_SCALE) / FP8_MAX
    data = functional.pad(wide / scale[:, None], (0, -hidden.shape[1] % ALIGNMENT))
    return data.clamp(-FP8_MAX, FP8_MAX).to(FP8), scale
