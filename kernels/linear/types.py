"""Formats of quantized weights. A decoding step reads every weight once, so fewer bits mean more speed.

In all formats, a weight is (number - zero) * scale. Scales and zeros belong to one feature, and to one of the equal
groups of consecutive inputs. One group has all inputs: a scale per feature.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
#: Alignment of the inner dimension for tensor cores, and of both dimensions of an FP8 weight for `torch._scaled_mm`.
ALIGNMENT = 16
#: Smallest scale, which avoids division by zero for rows of zeros.
SMALLEST_SCALE = 1e-12


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """FP8 weight (E4M3) without zeros."""

    # (features, inputs), both padded with zeros to multiples of 16.
    data: Tensor
    # (groups, padded features) float32.
    scale: Tensor
    # (features, inputs) without padding.
    shape: tuple[int, int]

    def rows(self, start: int, stop: int) -> Fp8Weight:
        """Return the weight of some features."""
        stop = min(stop, self.shape[0])
        return Fp8Weight(self.data[start:stop], self.scale[:, start:stop], (stop - start, self.shape[1]))

    def dequantized(self) -> Tensor:
        """Return the weight as (features, inputs) float32."""
        features, inputs = self.shape
        return _dequantized(self.data[:features, :inputs].float(), self.scale[:, :features], None)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """INT8 weight: integers from -128 to 127."""

    # (features, inputs) int8.
    data: Tensor
    # (groups, features) float32.
    scale: Tensor
    # (groups, features) int8; None if all are 0.
    zero: Tensor | None = None
    # (inputs,) int64: the activation that each column is multiplied with; None if in order.
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    def rows(self, start: int, stop: int) -> Int8Weight:
        """Return the weight of some features."""
        zero = None if self.zero is None else self.zero[:, start:stop]
        return replace(self, data=self.data[start:stop], scale=self.scale[:, start:stop], zero=zero)

    def dequantized(self) -> Tensor:
        """Return the weight as (features, inputs) float32, with its columns in `order`."""
        return _dequantized(self.data.float(), self.scale, self.zero)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """INT4 weight: integers from -8 to 7."""

    # (steps, features, inputs of a step / 4) int16. A word holds, from its lowest bits up, one value plus 8 from each
    # quarter of the step. Steps come first, so that a tile of features reads contiguous memory in each step. A step is
    # part of a group, or has two or four groups.
    packed: Tensor
    # (groups, features) float32.
    scale: Tensor
    # (groups, features) int8; None if all are 0.
    zero: Tensor | None = None
    # (inputs,) int64: the activation that each column is multiplied with; None if in order.
    order: Tensor | None = None

    @property
    def step(self) -> int:
        """Inputs per step."""
        return 4 * self.packed.shape[2]

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[1], self.packed.shape[0] * self.step

    def rows(self, start: int, stop: int) -> Int4Weight:
        """Return the weight of some features."""
        zero = None if self.zero is None else self.zero[:, start:stop]
        return replace(self, packed=self.packed[:, start:stop], scale=self.scale[:, start:stop], zero=zero)

    def values(self) -> Tensor:
        """Return the integers as (features, inputs) int8."""
        words = self.packed.int()
        values = torch.cat([(words >> shift & 0xF) - 8 for shift in (0, 4, 8, 12)], dim=2)
        return values.to(torch.int8).transpose(0, 1).reshape(self.shape)

    def dequantized(self) -> Tensor:
        """Return the weight as (features, inputs) float32, with its columns in `order`."""
        return _dequantized(self.values().float(), self.scale, self.zero)


QuantizedWeight = Fp8Weight | Int8Weight | Int4Weight


def _dequantized(numbers: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    groups = numbers.reshape(len(numbers), len(scale), -1)
    if zero is not None:
        groups = groups - zero.t()[:, :, None]
    return (groups * scale.t()[:, :, None]).reshape(numbers.shape)
