"""Linear layers with quantised weights: the formats, how weights get into them, and what a product with them is.

A decoding step reads every weight once, so a weight of 8 or 4 bits is worth twice or four times the speed. Integers
are multiplied with activations as they are (W8A16, W4A16); FP8 weights with activations that are rounded to FP8 too,
token by token, for that is what tensor cores multiply.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ...protocol.errors import ConfigurationError
from ..runtime.backend import uses_triton

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
GROUP_SIZES = (64, 128)
_INT8_MAX = 127.0
#: What tensor cores ask of the inner dimension, and `torch._scaled_mm` of both dimensions of an FP8 weight.
_ALIGNMENT = 16
_FP8_CAPABILITY = (8, 9)
SMALLEST = 1e-12  # a row of zeros gets a scale that is no zero


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """E4M3 with one scale for each feature: weight = data * scale.

    `data` (features, inputs), both padded with zeros to multiples of 16; `scale` (padded features,) float32, all equal
    if the tensor has one scale only. `shape` is (features, inputs) without padding.
    """

    data: Tensor
    scale: Tensor
    shape: tuple[int, int]

    def dequantized(self) -> Tensor:
        """(features, inputs) float32."""
        features, inputs = self.shape
        return (self.data.float() * self.scale[:, None])[:features, :inputs]


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Symmetric, -127 to 127, a float32 scale for each feature: `data` (features, inputs) int8, `scale` (features,)."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    def dequantized(self) -> Tensor:
        """(features, inputs) float32."""
        return self.data.float() * self.scale[:, None]


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Symmetric, -8 to 7, one scale for each `group_size` consecutive inputs of a feature.

    `packed` (groups, features, group_size / 4) int16: four bits in order from the lowest are the values plus 8 of four
    quarters of the group, so that a word of one quarter's inputs is a word of all four's. Groups come first, so what a
    tile of features reads in one step is one piece of memory. `scale` (groups, features) float32.

    Symmetric, for zero points would be read, too, and would need the sums of the activations. The scale has the sign
    that gives a group's largest magnitude the value -8: with all sixteen values used, normal weights lose 10.3 % (128)
    or 9.5 % (64) of their norm, with zero points 10.0 and 9.0 %.
    """

    packed: Tensor
    scale: Tensor

    @property
    def group_size(self) -> int:
        return 4 * self.packed.shape[2]

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[1], self.packed.shape[0] * self.group_size

    def dequantized(self) -> Tensor:
        """(features, inputs) float32."""
        words = self.packed.int()
        values = torch.cat([(words >> shift & 0xF) - 8 for shift in (0, 4, 8, 12)], dim=2)
        return (values * self.scale[:, :, None]).transpose(0, 1).reshape(self.shape)


QuantizedWeight = Fp8Weight | Int8Weight | Int4Weight


def quantize_fp8(weight: Tensor, *, per_tensor: bool = False) -> Fp8Weight:
    """`weight` (features, inputs) with a scale for each feature, or one for all."""
    wide = weight.float()
    largest = wide.abs().amax(dim=1)
    scale = (largest.amax().expand_as(largest) if per_tensor else largest).clamp(min=SMALLEST) / FP8_MAX
    data = (wide / scale[:, None]).clamp(-FP8_MAX, FP8_MAX)
    features, inputs = weight.shape
    data = functional.pad(data, (0, -inputs % _ALIGNMENT, 0, -features % _ALIGNMENT)).to(FP8)
    return Fp8Weight(data, functional.pad(scale, (0, -features % _ALIGNMENT), value=1.0), (features, inputs))


def quantize_int8(weight: Tensor) -> Int8Weight:
    """`weight` (features, inputs); inputs a multiple of 16."""
    _check_inputs(weight, _ALIGNMENT)
    wide = weight.float()
    scale = wide.abs().amax(dim=1).clamp(min=SMALLEST) / _INT8_MAX
    return Int8Weight((wide / scale[:, None]).round().to(torch.int8), scale)


def quantize_int4(weight: Tensor, group_size: int = 128) -> Int4Weight:
    """`weight` (features, inputs); inputs a multiple of `group_size`, which is 64 or 128."""
    if group_size not in GROUP_SIZES:
        raise ConfigurationError(f"group_size must be one of {GROUP_SIZES}, not {group_size}.", param="group_size")
    _check_inputs(weight, group_size)
    groups = weight.float().reshape(weight.shape[0], -1, group_size).transpose(0, 1)
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    scale = extreme / -8
    scale = torch.where(scale == 0, SMALLEST, scale)
    values = (groups / scale).round().clamp(-8, 7).int() + 8
    first, second, third, fourth = values.chunk(4, dim=2)
    words = first | second << 4 | third << 8 | fourth << 12
    return Int4Weight(words.to(torch.int16).contiguous(), scale.squeeze(2).contiguous())


def quantized_linear(hidden: Tensor, weight: QuantizedWeight) -> Tensor:
    """`hidden` (tokens, inputs) times the weight's transpose: (tokens, features) in the dtype of `hidden`.

    On CUDA float16 or bfloat16, rows contiguous. FP8 below compute capability 8.9 is dequantised in every call.
    """
    _check_hidden(hidden, weight)
    if not uses_triton(hidden) or (isinstance(weight, Fp8Weight) and not _multiplies_fp8(hidden)):
        return quantized_linear_reference(hidden, weight)
    from . import triton as quantized_triton

    if isinstance(weight, Fp8Weight):
        return quantized_triton.fp8_linear(hidden, weight)
    if isinstance(weight, Int8Weight):
        return quantized_triton.int8_linear(hidden, weight)
    return quantized_triton.int4_linear(hidden, weight)


def quantized_linear_reference(hidden: Tensor, weight: QuantizedWeight) -> Tensor:
    """The product with the dequantised weight. Activations stay as they are, with FP8 weights, too."""
    return functional.linear(hidden, weight.dequantized().to(hidden.dtype))


def quantize_tokens_reference(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """`hidden` (tokens, inputs) as FP8, its inputs padded to a multiple of 16, and a float32 scale for each token."""
    wide = hidden.float()
    scale = wide.abs().amax(dim=1).clamp(min=SMALLEST) / FP8_MAX
    data = functional.pad(wide / scale[:, None], (0, -hidden.shape[1] % _ALIGNMENT))
    return data.clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def _multiplies_fp8(hidden: Tensor) -> bool:
    return torch.cuda.get_device_capability(hidden.device) >= _FP8_CAPABILITY


def _check_inputs(weight: Tensor, multiple: int) -> None:
    if weight.ndim != 2 or weight.shape[1] % multiple:
        raise ConfigurationError(
            f"A weight of shape {tuple(weight.shape)} cannot be quantised: its inputs are no multiple of {multiple}.",
            param="quantization",
        )


def _check_hidden(hidden: Tensor, weight: QuantizedWeight) -> None:
    if hidden.ndim != 2 or hidden.shape[1] != weight.shape[1] or not hidden.is_floating_point():
        raise ConfigurationError(
            f"Activations {tuple(hidden.shape)} in {hidden.dtype} do not fit a weight of shape {weight.shape}.",
            param="hidden",
        )
    if hidden.shape[1] > 1 and hidden.stride(1) != 1:
        raise ConfigurationError("The activations' rows must be contiguous.", param="hidden")
