"""Products with quantised weights in plain torch: the definition that the kernels are checked against."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from .types import QuantizedWeight


def quantized_linear_reference(hidden: Tensor, weight: QuantizedWeight) -> Tensor:
    """The product with the dequantised weight. Activations stay as they are, with FP8 weights, too."""
    return functional.linear(hidden, weight.dequantized().to(hidden.dtype))
