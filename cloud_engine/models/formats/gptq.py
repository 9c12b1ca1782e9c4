"""GPTQ (Frantar et al. 2023): 4 or 8 bits in groups, as AutoGPTQ and GPTQModel store them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ....protocol.errors import ModelLoadError
from ..fields import Fields
from .format import Format, StoredWeight, needed_zeros, order_of, signed, unpacked


@dataclass(frozen=True, slots=True)
class Gptq:
    """Words of several inputs: `qweight` (inputs / numbers per word, outputs); `qzeros` has words of outputs."""

    bits: int
    # Added to the stored zeros: the first version of the format stores them minus 1.
    zero_offset: int
    required: tuple[str, ...] = ("qweight", "qzeros", "scales")
    optional: tuple[str, ...] = ("g_idx",)
    ignored: tuple[str, ...] = ()

    def decode(self, tensors: Mapping[str, Tensor], inputs: int) -> StoredWeight:
        words, zeros, scale = (tensors[name] for name in self.required)
        (groups, outputs), per_word = scale.shape, 32 // self.bits
        if words.shape != (inputs // per_word, outputs) or inputs % groups or inputs % per_word:
            raise ModelLoadError(
                f"qweight {tuple(words.shape)} and scales {tuple(scale.shape)} do not fit {inputs} inputs"
            )
        if zeros.shape != (groups, outputs // per_word):
            raise ModelLoadError(f"qzeros {tuple(zeros.shape)} do not fit scales {tuple(scale.shape)}")
        numbers = signed(unpacked(words.t(), self.bits), self.bits)
        zero = signed((unpacked(zeros, self.bits) + self.zero_offset) & (1 << self.bits) - 1, self.bits)
        order = order_of(tensors["g_idx"], groups) if "g_idx" in tensors else None
        numbers = numbers if order is None else numbers[:, order]
        return StoredWeight(numbers, scale.t().float(), needed_zeros(zero.t()), self.bits, order)


def read(settings: Fields) -> tuple[Format, ...]:
    settings.only("bits", 4, 8)
    settings.only("checkpoint_format", "gptq", "gptq_v2")
    is_first = settings.values.get("checkpoint_format", "gptq") == "gptq"
    return (Gptq(settings.integer("bits", 4), int(is_first)),)
