"""Linear layers with quantized weights in C for CPUs, in panels like those of `cpu`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..runtime.native_library import load, loaded
from .cpu import CWeights, NativeLinear
from .types import Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight

_FORMATS: dict[type[QuantizedWeight], int] = {Int8Weight: 1, Int4Weight: 2, Fp8Weight: 3}  # as in native/calls.h
_LONGEST_SUM = 1024  # inputs that C sums at a time: shorter sums have smaller rounding errors
_INPUTS_PER_WORD = 8  # of INT4 weights
_PANELS_AT_ONCE = 64


class NativeQuantizedLinear(NativeLinear):
    """Computes a layer with a quantized weight, for which `can_pack_quantized` must hold, and whose `order` is None."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.shape, self.dtype = weight.shape, dtype
        panel: int = loaded().linear_panel()
        self.weight = torch.cat([_packed(weight.rows(*rows), panel) for rows in _spans(self.shape[0], panel)])
        self._bias = None if bias is None else bias.detach().to(dtype).contiguous()
        groups = len(weight.scale)
        parts = _parts(self.shape[1] // groups)
        self._scale = _in_panels(weight.scale[:, : self.shape[0]], panel, parts)
        zero = None if isinstance(weight, Fp8Weight) else weight.zero
        self._zero = None if zero is None else _in_panels(zero, panel, parts)
        self._use(
            CWeights(
                scale=self._scale.data_ptr(),
                zero=None if self._zero is None else self._zero.data_ptr(),
                format=_FORMATS[type(weight)],
                groups=groups * parts,
            )
        )


def can_pack_quantized(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Return whether `NativeQuantizedLinear` supports a weight, with activations of `dtype`."""
    is_pair = weight.shape[1] // len(weight.scale) % 2 == 0
    supported = dtype == torch.float32 or (dtype == torch.bfloat16 and is_pair)
    return weight.scale.device.type == "cpu" and supported and load() is not None


def _parts(length: int) -> int:
    """Return into how many sums C divides a group; 1 if no equal parts are short enough."""
    counts = (count for count in range(1, length + 1) if length % (count * _INPUTS_PER_WORD) == 0)
    return next((count for count in counts if length // count <= _LONGEST_SUM), 1)


def _spans(features: int, panel: int) -> list[tuple[int, int]]:
    at_once = _PANELS_AT_ONCE * panel
    return [(start, min(start + at_once, features)) for start in range(0, features, at_once)]


def _packed(weight: QuantizedWeight, panel: int) -> Tensor:
    """Rearrange into panels, (panels, inputs, outputs of a panel) int8, or words of eight INT4 inputs."""
    features, inputs = weight.shape
    if isinstance(weight, Int4Weight):
        eights = (weight.values() + 8).int().view(features, -1, _INPUTS_PER_WORD)
        words = torch.zeros_like(eights[:, :, 0])
        for index in range(_INPUTS_PER_WORD):
            words |= eights[:, :, index] << (index // 2 * 4 + index % 2 * 16)
    else:
        words = weight.data[:features, :inputs].view(torch.int8)
    padded = functional.pad(words, (0, 0, 0, -features % panel))
    return padded.view(-1, panel, padded.shape[1]).transpose(1, 2).contiguous()


def _in_panels(rows: Tensor, panel: int, parts: int) -> Tensor:
    """Rearrange (groups, features) into (panels, groups, features of a panel), each group repeated `parts` times."""
    padded = functional.pad(rows, (0, -rows.shape[1] % panel)).repeat_interleave(parts, 0)
    return padded.view(len(padded), -1, panel).transpose(0, 1).contiguous()
