"""Quantization of weights: FP8 with a scale per feature or tensor, INT8 per feature, INT4 per group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...protocol.errors import ConfigurationError
from ..runtime.numeric import FP8_MAX
from .types import ALIGNMENT, FP8, SMALLEST_SCALE, Fp8Weight, Int4Weight, Int8Weight

GROUP_SIZES = (128, 64)
_INT8_MAX = 127.0
_STEPS = (128, 64)  # inputs that a step of the INT4 kernel can have


def quantize_fp8(weight: Tensor, *, per_tensor: bool = False) -> Fp8Weight:
    """Quantize `weight` (features, inputs) to FP8, with a scale per feature or one for all."""
    wide = weight.float()
    largest = wide.abs().amax(dim=1)
    scale = (largest.amax().expand_as(largest) if per_tensor else largest).clamp(min=SMALLEST_SCALE) / FP8_MAX
    return fp8_weight((wide / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale[None])


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Quantize `weight` (features, inputs) to INT8; inputs must be a multiple of 16."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1).clamp(min=SMALLEST_SCALE) / _INT8_MAX
    return int8_weight((wide / scale[:, None]).round().to(torch.int8), scale[None])


def quantize_int4(weight: Tensor, group_size: int | None = None) -> Int4Weight:
    """Quantize `weight` (features, inputs) to INT4; inputs must be a multiple of `group_size`, which is 64 or 128.

    None: the larger that divides the inputs. A scale's sign makes its group's largest magnitude -8, so zeros would gain
    little and are not used.
    """
    inputs = weight.shape[1]
    if group_size is None:
        group_size = next((size for size in GROUP_SIZES if inputs % size == 0), min(GROUP_SIZES))
    if group_size not in GROUP_SIZES:
        raise ConfigurationError(f"group_size must be one of {GROUP_SIZES}, not {group_size}.", param="group_size")
    _check_inputs(weight, group_size)
    groups = weight.float().reshape(weight.shape[0], -1, group_size)
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    scale = extreme / -8
    scale = torch.where(scale == 0, SMALLEST_SCALE, scale)
    values = (groups / scale).round().clamp(-8, 7).to(torch.int8)
    return int4_weight(values.reshape(weight.shape), scale.squeeze(2).t())


def fp8_weight(data: Tensor, scale: Tensor) -> Fp8Weight:
    """Return the weight of `data` (features, inputs) in FP8 and `scale` (groups, features)."""
    features, inputs = data.shape
    if len(scale) > 1:
        _check_inputs(data, ALIGNMENT)
    padded = functional.pad(data.view(torch.uint8), (0, -inputs % ALIGNMENT, 0, -features % ALIGNMENT)).view(FP8)
    return Fp8Weight(padded, functional.pad(scale, (0, -features % ALIGNMENT), value=1.0), (features, inputs))


def int8_weight(
    data: Tensor, scale: Tensor, zero: Tensor | None = None, order: Tensor | None = None, **minima: Tensor | None
) -> Int8Weight:
    """Return the weight of `data` (features, inputs) int8, whose groups must be multiples of 16 inputs.

    `minima`: the fields `minimum`, `scale_factor` and `minimum_factor`.
    """
    _check_inputs(data, ALIGNMENT * len(scale))
    terms = _contiguous(scale=scale, zero=zero, **minima)
    return Int8Weight(data=data.contiguous(), order=order, **terms)


def int4_weight(
    values: Tensor, scale: Tensor, zero: Tensor | None = None, order: Tensor | None = None, **minima: Tensor | None
) -> Int4Weight:
    """Return the weight of `values` (features, inputs) int8 from -8 to 7, or from 0 to 15 with a minimum.

    Inputs must be a multiple of 64. A group must be a multiple of 64 inputs, or have 32 or 16. `minima`: the fields
    `minimum`, `scale_factor` and `minimum_factor`.
    """
    features, inputs = values.shape
    _check_inputs(values, min(_STEPS))
    length = inputs // len(scale)
    step = next((step for step in _STEPS if length % step == 0), min(_STEPS))
    if length % step and length not in (32, 16):
        raise ConfigurationError(
            f"Groups of {length} inputs are not supported in 4 bits: use 16, 32 or multiples of 64.",
            param="quantization",
        )
    nibbles = (values if minima.get("minimum") is not None else values + 8).view(torch.uint8)
    low, low_high, high, highest = nibbles.view(features, inputs // step, 4, step // 4).unbind(2)
    words = torch.stack((low | low_high << 4, high | highest << 4), dim=3).view(torch.int16).squeeze(3)
    terms = _contiguous(scale=scale, zero=zero, **minima)
    return Int4Weight(packed=words.transpose(0, 1).contiguous(), order=order, **terms)


def _contiguous(**terms: Tensor | None) -> dict[str, Any]:
    return {name: None if term is None else term.contiguous() for name, term in terms.items()}


def _check_inputs(weight: Tensor, multiple: int) -> None:
    if weight.ndim != 2 or weight.shape[1] % multiple:
        raise ConfigurationError(
            f"A weight of shape {tuple(weight.shape)} cannot be quantized: inputs must be a multiple of {multiple}.",
            param="quantization",
        )
