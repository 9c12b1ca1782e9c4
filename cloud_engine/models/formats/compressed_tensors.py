"""Checkpoints of llm-compressor, in the formats of the compressed-tensors library.

Bits, groups and zeros follow from the stored tensors, so layers may have different schemes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ....protocol.errors import ModelLoadError
from ..fields import Fields
from .format import Format, StoredWeight, needed_zeros, order_of, signed, spread, unpacked
from .fp8 import ACTIVATION_SCALES, block_of

_SUPPORTED = ("dense", "float-quantized", "int-quantized", "mixed-precision", "naive-quantized", "pack-quantized")
_DTYPES = (torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class Quantized:
    """`weight` in INT8 or FP8 (E4M3): the formats `int-quantized` and `float-quantized`."""

    block: tuple[int, int] | None
    required: tuple[str, ...] = ("weight", "weight_scale")
    optional: tuple[str, ...] = ("weight_zero_point", "weight_g_idx")
    ignored: tuple[str, ...] = ACTIVATION_SCALES

    def decode(self, tensors: Mapping[str, Tensor], inputs: int) -> StoredWeight:
        weight = tensors["weight"]
        if weight.dtype not in _DTYPES:
            raise ModelLoadError(f"weight is stored as {weight.dtype}, not as int8 or float8_e4m3fn")
        zero = tensors.get("weight_zero_point")
        if zero is not None:
            zero = spread(zero, len(weight), inputs).to(torch.int8)
        return _decoded(tensors, weight, spread(tensors["weight_scale"], len(weight), inputs, self.block), zero, 8)


@dataclass(frozen=True, slots=True)
class Packed:
    """`weight_packed` (outputs, words of 4 or 8 bits per input): the format `pack-quantized`."""

    required: tuple[str, ...] = ("weight_packed", "weight_scale")
    optional: tuple[str, ...] = ("weight_zero_point", "weight_g_idx")
    ignored: tuple[str, ...] = ("weight_shape", *ACTIVATION_SCALES)

    def decode(self, tensors: Mapping[str, Tensor], inputs: int) -> StoredWeight:
        words = tensors["weight_packed"]
        outputs = len(words)
        bits = next((bits for bits in (4, 8) if words.shape[1:] == (-(-inputs * bits // 32),)), None)
        if bits is None:
            raise ModelLoadError(f"weight_packed {tuple(words.shape)} does not hold 4 or 8 bits of {inputs} inputs")
        numbers = signed(unpacked(words, bits)[:, :inputs], bits)
        scale = spread(tensors["weight_scale"], outputs, inputs)
        zero = tensors.get("weight_zero_point")
        if zero is not None:  # words of several outputs
            if zero.shape != (-(-outputs * bits // 32), scale.shape[1]):
                raise ModelLoadError(f"weight_zero_point {tuple(zero.shape)} does not fit {outputs} outputs")
            zero = signed(unpacked(zero.t(), bits)[:, :outputs], bits).t()
        return _decoded(tensors, numbers, scale, zero, bits)


def read(settings: Fields) -> tuple[Format, ...]:
    settings.only("format", *_SUPPORTED)
    for key in ("sparsity_config", "transform_config"):
        value = settings.mapping(key)
        if value and value.get("format") != "dense":
            raise ModelLoadError(f"{settings.where}: {key} is not supported.")
    block: tuple[int, int] | None = None
    for name, value in settings.mapping("config_groups").items():
        group = Fields(value if isinstance(value, dict) else {}, f"{settings.where}: {name}")
        group.only("format", None, *_SUPPORTED)
        weights = Fields(group.mapping("weights"), group.where)
        weights.only("num_bits", 8, 4)
        block = block_of(weights, "block_structure") or block
    return Packed(), Quantized(block)


def _decoded(
    tensors: Mapping[str, Tensor], numbers: Tensor, scale: Tensor, zero: Tensor | None, bits: int
) -> StoredWeight:
    order = order_of(tensors["weight_g_idx"], scale.shape[1]) if "weight_g_idx" in tensors else None
    numbers = numbers if order is None else numbers[:, order]
    return StoredWeight(numbers, scale, None if zero is None else needed_zeros(zero), bits, order)
