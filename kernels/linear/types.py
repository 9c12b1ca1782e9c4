"""Formats of quantized weights. A decoding step reads every weight once, so fewer bits mean more speed.

In all formats, a weight is (number - zero) * scale + minimum. These terms belong to one feature, and to one of the
equal groups of consecutive inputs. One group has all inputs: a scale per feature.
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
#: Which features to select: a slice, or a tensor of indices.
Selection = slice | Tensor


def term_values(term: Tensor, factor: Tensor | None, dim: int = 0) -> Tensor:
    """Return scales or minima as float32; groups are in dimension `dim`. Each factor belongs to several groups."""
    if factor is None:
        return term.float()
    return term.float() * factor.float().repeat_interleave(term.shape[dim] // factor.shape[dim], dim)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """FP8 weight (E4M3) without zeros."""

    # (features, inputs), both padded with zeros to multiples of 16.
    data: Tensor
    # (groups, padded features) float32.
    scale: Tensor
    # (features, inputs) without padding.
    shape: tuple[int, int]

    def rows(self, selected: Selection) -> Fp8Weight:
        """Return the weight of some features."""
        data = self.data[: self.shape[0]][selected]
        return Fp8Weight(data, self.scale[:, : self.shape[0]][:, selected], (len(data), self.shape[1]))

    def dequantized(self) -> Tensor:
        """Return the weight as (features, inputs) float32."""
        features, inputs = self.shape
        numbers = self.data[:features, :inputs].float().reshape(features, len(self.scale), -1)
        return (numbers * self.scale[:, :features].t()[:, :, None]).reshape(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerWeight:
    """Terms of the groups of an integer weight, (groups, features), and the order of its inputs."""

    # float32 or float16; int8 if there are factors.
    scale: Tensor
    # int8; None if all are 0.
    zero: Tensor | None = None
    # In the type of `scale`; None if all are 0.
    minimum: Tensor | None = None
    # (larger groups, features) float16: factors of `scale` and of `minimum`. None: 1.
    scale_factor: Tensor | None = None
    minimum_factor: Tensor | None = None
    # (inputs,) int64: the activation that each column is multiplied with; None if in order.
    order: Tensor | None = None

    def _terms(self, selected: Selection) -> dict[str, Tensor]:
        """Return the terms of some features, by the names of their fields."""
        names = ("scale", "zero", "minimum", "scale_factor", "minimum_factor")
        terms: dict[str, Tensor | None] = {name: getattr(self, name) for name in names}
        return {name: term[:, selected] for name, term in terms.items() if term is not None}

    def _dequantized(self, numbers: Tensor) -> Tensor:
        groups = numbers.float().reshape(len(numbers), len(self.scale), -1)
        if self.zero is not None:
            groups -= self.zero.t()[:, :, None]
        groups *= term_values(self.scale, self.scale_factor).t()[:, :, None]
        if self.minimum is not None:
            groups += term_values(self.minimum, self.minimum_factor).t()[:, :, None]
        return groups.reshape(numbers.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Weight(IntegerWeight):
    """INT8 weight: integers from -128 to 127."""

    # (features, inputs) int8.
    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    def rows(self, selected: Selection) -> Int8Weight:
        """Return the weight of some features."""
        return replace(self, data=self.data[selected], **self._terms(selected))

    def dequantized(self) -> Tensor:
        """Return the weight as (features, inputs) float32, with its columns in `order`."""
        return self._dequantized(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Weight(IntegerWeight):
    """INT4 weight: integers from -8 to 7, or from 0 to 15 if there are minima."""

    # (steps, features, inputs of a step / 4) int16. A word holds, from its lowest bits up, one value from each quarter
    # of the step, plus 8 if values begin at -8. Steps come first, so that a tile of features reads contiguous memory
    # in each step. A step is part of a group, or has two or four groups.
    packed: Tensor

    @property
    def step(self) -> int:
        """Inputs per step."""
        return 4 * self.packed.shape[2]

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[1], self.packed.shape[0] * self.step

    def rows(self, selected: Selection) -> Int4Weight:
        """Return the weight of some features."""
        return replace(self, packed=self.packed[:, selected], **self._terms(selected))

    def values(self) -> Tensor:
        """Return the integers as (features, inputs) int8."""
        shifts = torch.arange(0, 16, 4, dtype=torch.int16, device=self.packed.device)
        values = self.packed.transpose(0, 1)[:, :, None] >> shifts[:, None] & 0xF
        return (values - (8 if self.minimum is None else 0)).to(torch.int8).reshape(self.shape)

    def dequantized(self) -> Tensor:
        """Return the weight as (features, inputs) float32, with its columns in `order`."""
        return self._dequantized(self.values())


QuantizedWeight = Fp8Weight | Int8Weight | Int4Weight
