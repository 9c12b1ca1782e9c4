"""Formats of quantized weights. A decoding step reads every weight once, so fewer bits mean more speed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
#: Alignment of the inner dimension for tensor cores, and of both dimensions of an FP8 weight for `torch._scaled_mm`.
ALIGNMENT = 16
#: Smallest scale, which avoids division by zero for rows of zeros.
SMALLEST_SCALE = 1e-12


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """FP8 weight (E4M3) with one scale per feature: weight = data * scale."""

    # (features, inputs), both padded with zeros to multiples of 16.
    data: Tensor
    # (padded features,) float32; all equal if the tensor has a single scale.
    scale: Tensor
    # (features, inputs) without padding.
    shape: tuple[int, int]

    def dequantized(self) -> Tensor:
        """Return the weight as (features, inputs) float32."""
        features, inputs = self.shape
        return (self.data.float() * self.scale[:, None])[:features, :inputs]


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """INT8 weight: symmetric integers from -127 to 127, with one scale per feature."""

    # (features, inputs) int8.
    data: Tensor
    # (features,) float32.
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    def dequantized(self) -> Tensor:
        """Return the weight as (features, inputs) float32."""
        return self.data.float() * self.scale[:, None]


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """INT4 weight: integers from -8 to 7, with one scale per `group_size` consecutive inputs of a feature.

    Zero points would gain little and are not used. The scale's sign makes a group's largest magnitude -8.
    """

    # (groups, features, group_size / 4) int16. A word holds, from its lowest bits up, one value plus 8 from each
    # quarter of the group. Groups come first, so that a tile of features reads contiguous memory in each step.
    packed: Tensor
    # (groups, features) float32.
    scale: Tensor

    @property
    def group_size(self) -> int:
        return 4 * self.packed.shape[2]

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[1], self.packed.shape[0] * self.group_size

    def dequantized(self) -> Tensor:
        """Return the weight as (features, inputs) float32."""
        words = self.packed.int()
        values = torch.cat([(words >> shift & 0xF) - 8 for shift in (0, 4, 8, 12)], dim=2)
        return (values * self.scale[:, :, None]).transpose(0, 1).reshape(self.shape)


QuantizedWeight = Fp8Weight | Int8Weight | Int4Weight
