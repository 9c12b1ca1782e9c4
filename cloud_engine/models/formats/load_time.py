"""Quantization of plain weights while a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ....kernels.linear.quantization import quantize_fp8, quantize_int4, quantize_int8
from ....kernels.linear.types import QuantizedWeight
from ....kernels.runtime.backend import Quantization
from ....kernels.runtime.numeric import FP8_CAPABILITY
from ....protocol.errors import ConfigurationError
from ..fields import Fields

_QUANTIZERS: Mapping[Quantization, Callable[[Tensor], QuantizedWeight]] = {
    "fp8": quantize_fp8,
    "int8": quantize_int8,
    "int4": quantize_int4,
}


def quantizer(method: Quantization, fields: Fields, device: str) -> Callable[[Tensor], QuantizedWeight]:
    """Return the function that quantizes a plain weight.

    Raises ConfigurationError if the checkpoint is quantized already, or the device cannot multiply such weights.
    """
    if stored := fields.mapping("quantization_config"):
        raise ConfigurationError(
            f"quantization: {fields.where} is quantized already ({stored.get('quant_method')}). Omit the option.",
            param="quantization",
        )
    if method == "fp8" and device != "cpu" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        fault = "quantization: fp8 needs a GPU of compute capability 8.9 or higher. Use int8."
        raise ConfigurationError(fault, param="quantization")
    return _QUANTIZERS[method]
