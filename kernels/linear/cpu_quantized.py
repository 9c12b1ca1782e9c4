"""Linear layers with quantized weights in C for CPUs, in panels like those of `cpu`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..runtime.native_library import load, loaded
from .cpu import CWeights, NativeLinear, call_pack
from .types import Fp8Weight, Int4Weight, Int8Weight, QuantizedWeight

_FORMATS: dict[type[QuantizedWeight], int] = {Int8Weight: 1, Int4Weight: 2, Fp8Weight: 3}  # as in native/calls.h
_LONGEST_SUM = 1024  # inputs that C sums at a time: shorter sums have smaller rounding errors
_INPUTS_PER_WORD = 8  # of INT4 weights


class NativeQuantizedLinear(NativeLinear):
    """Computes a layer with a quantized weight, for which `can_pack_quantized` must hold, and whose `order` is None."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.shape, self.dtype = weight.shape, dtype
        outputs, inputs = weight.shape
        self._panel: int = loaded().linear_panel()
        groups, panels = len(weight.scale), -(-outputs // self._panel)
        parts = _parts(inputs // groups)
        form = CWeights(outputs=outputs, inputs=inputs, format=_FORMATS[type(weight)], groups=groups * parts)
        numbers = (weight.packed if isinstance(weight, Int4Weight) else weight.data.view(torch.int8)).contiguous()
        words = 4 if isinstance(weight, Int4Weight) else 1  # inputs per number
        self.weight = numbers.new_zeros((panels, inputs // words, self._panel))
        call_pack(loaded().quantized_pack, numbers, numbers.stride(-2), self.weight, form)
        self._bias = None if bias is None else bias.detach().to(dtype).contiguous()
        self._set(form, "scale", weight.scale[:, :outputs], parts)
        if not isinstance(weight, Fp8Weight):
            for name in ("zero", "minimum"):
                self._set(form, name, getattr(weight, name), parts)
            for name in ("scale_factor", "minimum_factor"):
                self._set(form, name, getattr(weight, name))
            form.factor_groups = 0 if weight.scale_factor is None else form.groups // len(weight.scale_factor)
        form.has_halves = weight.scale.dtype == torch.float16
        self._use(form)

    def _set(self, form: CWeights, field: str, term: Tensor | None, parts: int = 1) -> None:
        """Rearrange a term (groups, features) into panels (panels, groups, features of a panel) for C.

        Each group is repeated `parts` times.
        """
        if term is None:
            return
        padded = functional.pad(term, (0, -term.shape[1] % self._panel)).repeat_interleave(parts, 0)
        panels = padded.view(len(padded), -1, self._panel).transpose(0, 1).contiguous()
        setattr(form, field, panels.data_ptr())
        setattr(self, f"_{field}", panels)  # C keeps only the pointer


def can_pack_quantized(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Return whether `NativeQuantizedLinear` supports a weight, with activations of `dtype`."""
    is_pair = weight.shape[1] // len(weight.scale) % 2 == 0
    supported = dtype == torch.float32 or (dtype == torch.bfloat16 and is_pair)
    return weight.scale.device.type == "cpu" and supported and load() is not None


def _parts(length: int) -> int:
    """Return into how many sums C divides a group; 1 if no equal parts are short enough."""
    counts = (count for count in range(1, length + 1) if length % (count * _INPUTS_PER_WORD) == 0)
    return next((count for count in counts if length // count <= _LONGEST_SUM), 1)
