"""Quantization of weights: FP8 with a scale per feature or tensor, INT8 per feature, INT4 per group."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...protocol.errors import ConfigurationError
from ..runtime.numeric import FP8_MAX
from .types import ALIGNMENT, FP8, SMALLEST_SCALE, Fp8Weight, Int4Weight, Int8Weight

GROUP_SIZES = (64, 128)
_INT8_MAX = 127.0


def quantize_fp8(weight: Tensor, *, per_tensor: bool = False) -> Fp8Weight:
    """Quantize `weight` (features, inputs) to FP8, with a scale per feature or one for all."""
    wide = weight.float()
    largest = wide.abs().amax(dim=1)
    scale = (largest.amax().expand_as(largest) if per_tensor else largest).clamp(min=SMALLEST_SCALE) / FP8_MAX
    data = (wide / scale[:, None]).clamp(-FP8_MAX, FP8_MAX)
    features, inputs = weight.shape
    data = functional.pad(data, (0, -inputs % ALIGNMENT, 0, -features % ALIGNMENT)).to(FP8)
    return Fp8Weight(data, functional.pad(scale, (0, -features % ALIGNMENT), value=1.0), (features, inputs))


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Quantize `weight` (features, inputs) to INT8; inputs must be a multiple of 16."""
    _check_inputs(weight, ALIGNMENT)
    wide = weight.float()
    scale = wide.abs().amax(dim=1).clamp(min=SMALLEST_SCALE) / _INT8_MAX
    return Int8Weight((wide / scale[:, None]).round().to(torch.int8), scale)


def quantize_int4(weight: Tensor, group_size: int = 128) -> Int4Weight:
    """Quantize `weight` (features, inputs) to INT4; inputs must be a multiple of `group_size`, which is 64 or 128."""
    if group_size not in GROUP_SIZES:
        raise ConfigurationError(f"group_size must be one of {GROUP_SIZES}, not {group_size}.", param="group_size")
    _check_inputs(weight, group_size)
    groups = weight.float().reshape(weight.shape[0], -1, group_size).transpose(0, 1)
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    scale = extreme / -8
    scale = torch.where(scale == 0, SMALLEST_SCALE, scale)
    values = (groups / scale).round().clamp(-8, 7).int() + 8
    first, second, third, fourth = values.chunk(4, dim=2)
    words = first | second << 4 | third << 8 | fourth << 12
    return Int4Weight(words.to(torch.int16).contiguous(), scale.squeeze(2).contiguous())


def _check_inputs(weight: Tensor, multiple: int) -> None:
    if weight.ndim != 2 or weight.shape[1] % multiple:
        raise ConfigurationError(
            f"A weight of shape {tuple(weight.shape)} cannot be quantized: inputs must be a multiple of {multiple}.",
            param="quantization",
        )
