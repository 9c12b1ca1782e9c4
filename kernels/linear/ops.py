"""Products of activations and quantised weights.

INT8 and INT4 weights are multiplied with activations as they are (W8A16, W4A16). FP8 weights are multiplied with
activations that are rounded to FP8 token by token, because tensor cores multiply FP8 with FP8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..runtime.backend import uses_triton
from .reference import quantized_linear_reference
from .types import Fp8Weight, Int8Weight, QuantizedWeight

_FP8_CAPABILITY = (8, 9)


def quantized_linear(hidden: Tensor, weight: QuantizedWeight) -> Tensor:
    """`hidden` (tokens, inputs) times the weight's transpose: (tokens, features) in the dtype of `hidden`.

    On CUDA: float16 or bfloat16, contiguous rows. Below compute capability 8.9 FP8 is dequantised in every call.
    """
    _check_hidden(hidden, weight)
    if not uses_triton(hidden) or (isinstance(weight, Fp8Weight) and not _multiplies_fp8(hidden)):
        return quantized_linear_reference(hidden, weight)
    from .triton import fp8_linear, int4_linear, int8_linear

    if isinstance(weight, Fp8Weight):
        return fp8_linear(hidden, weight)
    if isinstance(weight, Int8Weight):
        return int8_linear(hidden, weight)
    return int4_linear(hidden, weight)


def _multiplies_fp8(hidden: Tensor) -> bool:
    return torch.cuda.get_device_capability(hidden.device) >= _FP8_CAPABILITY


def _check_hidden(hidden: Tensor, weight: QuantizedWeight) -> None:
    if hidden.ndim != 2 or hidden.shape[1] != weight.shape[1] or not hidden.is_floating_point():
        raise ConfigurationError(
            f"Activations {tuple(hidden.shape)} in {hidden.dtype} do not fit a weight of shape {weight.shape}.",
            param="hidden",
        )
    if hidden.shape[1] > 1 and hidden.stride(1) != 1:
        raise ConfigurationError("The activations' rows must be contiguous.", param="hidden")
