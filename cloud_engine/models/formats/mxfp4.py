"""MXFP4 as gpt-oss ships it: floats of 4 bits (E2M1), 32 of which share a power of two (OCP MX specification, 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ....protocol.errors import ModelLoadError
from ..fields import Fields
from .format import Format, StoredWeight

_GROUP = 32
_BIAS = 127  # of the stored exponents
#: Twice the float of each code, so that all are integers.
_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Tensors of all experts: `_blocks` (experts, outputs, groups, 16) with two inputs per byte, and `_scales`.

    No kernel knows E2M1, so the numbers are held as INT8, which is exact.
    """

    required: tuple[str, ...] = ("_blocks", "_scales")
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def decode(self, tensors: Mapping[str, Tensor], inputs: int) -> StoredWeight:
        """Decode the tensors of one expert."""
        blocks, scales = (tensors[name] for name in self.required)
        if blocks.shape != (len(blocks), inputs // _GROUP, _GROUP // 2) or scales.shape != blocks.shape[:2]:
            shapes = f"blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)}"
            raise ModelLoadError(f"{shapes} of an expert do not fit {inputs} inputs")
        codes = torch.stack((blocks & 0xF, blocks >> 4), dim=3).flatten(1).int()
        numbers = torch.tensor(_NUMBERS, dtype=torch.int8)[codes]
        return StoredWeight(numbers, torch.ldexp(torch.full(scales.shape, 0.5), scales.int() - _BIAS))


def read(settings: Fields) -> tuple[Format, ...]:
    del settings  # the stored tensors say which layers are quantized
    return (Mxfp4(),)
