"""FP8 checkpoints of transformers' method `fp8`: a scale per tensor, or per block as in DeepSeek-V3 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....protocol.errors import ModelLoadError
from ..fields import Fields
from .format import Format, StoredWeight, spread

#: Scales of activations, which are not read.
ACTIVATION_SCALES = ("input_scale", "input_zero_point", "activation_scale")


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """`weight` in E4M3, with scales that the numbers are multiplied by."""

    block: tuple[int, int] | None
    required: tuple[str, ...] = ("weight", "weight_scale_inv")
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ACTIVATION_SCALES

    def decode(self, tensors: Mapping[str, Tensor], inputs: int) -> StoredWeight:
        weight, scale = (tensors[name] for name in self.required)
        return StoredWeight(weight, spread(scale, len(weight), inputs, self.block))


def block_of(settings: Fields, key: str) -> tuple[int, int] | None:
    """Read the height and width of a block. Raises ModelLoadError for anything but two positive integers or null."""
    block: Any = settings.values.get(key)
    if block is None:
        return None
    if isinstance(block, list) and len(block) == 2 and all(isinstance(side, int) and side > 0 for side in block):
        return block[0], block[1]
    raise ModelLoadError(f"{settings.where}: {key} must be two positive integers, got {block!r}.")


def read(settings: Fields) -> tuple[Format, ...]:
    settings.only("fmt", "e4m3", "float8_e4m3fn")
    block = block_of(settings, "weight_block_size")
    if block is None:  # AutoFP8 calls the scale `weight_scale`
        return BlockFp8(None), BlockFp8(None, ("weight", "weight_scale"))
    return (BlockFp8(block),)
