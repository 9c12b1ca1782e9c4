"""AWQ (Lin et al. 2024): 4 bits in groups with zeros, in the packing order of AutoAWQ's GEMM kernel."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ....protocol.errors import ModelLoadError
from ..fields import Fields
from .format import Format, StoredWeight, needed_zeros, signed, unpacked

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # which four bits of a word hold each of eight consecutive outputs
_BITS = 4


class Awq:
    """Words of eight outputs: `qweight` (inputs, outputs / 8), `qzeros` (groups, outputs / 8)."""

    required: tuple[str, ...] = ("qweight", "qzeros", "scales")
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def decode(self, tensors: Mapping[str, Tensor], inputs: int) -> StoredWeight:
        words, zeros, scale = (tensors[name] for name in self.required)
        groups, outputs = scale.shape
        if words.shape != (inputs, outputs // 8) or zeros.shape != (groups, outputs // 8) or inputs % groups:
            raise ModelLoadError(
                f"qweight {tuple(words.shape)} and scales {tuple(scale.shape)} do not fit {inputs} inputs"
            )
        numbers = _outputs(words).t().contiguous()
        return StoredWeight(numbers, scale.t().float(), needed_zeros(_outputs(zeros).t()), _BITS)


def read(settings: Fields) -> tuple[Format, ...]:
    settings.only("bits", _BITS)
    settings.only("zero_point", True)
    settings.only("version", "gemm", "GEMM")
    return (Awq(),)


def _outputs(words: Tensor) -> Tensor:
    numbers = unpacked(words, _BITS).view(len(words), -1, 8)[:, :, _PLACES]
    return signed(numbers.flatten(1), _BITS)
