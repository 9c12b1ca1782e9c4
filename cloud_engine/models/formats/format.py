"""The protocol of a checkpoint format, and the common form into which formats decode a layer's weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ....kernels.linear.quantization import fp8_weight, int4_weight, int8_weight
from ....kernels.linear.types import FP8, QuantizedWeight
from ....protocol.errors import ConfigurationError, ModelLoadError
from ..sharding import Shard


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantized matrix: weight = (number - zero) * scale, with a scale and a zero per output and group of inputs."""

    # (outputs, inputs) int8 or FP8.
    numbers: Tensor
    # (outputs, groups) float32.
    scale: Tensor
    # (outputs, groups) int8; None if all are 0.
    zero: Tensor | None = None
    # Bits per number: 8, or 4 for numbers from -8 to 7.
    bits: int = 8
    # (inputs,) int64: the input of each column; None if in order. Its groups would be scattered otherwise.
    order: Tensor | None = None

    @property
    def group_size(self) -> int:
        return self.numbers.shape[1] // self.scale.shape[1]

    def deinterleaved(self) -> StoredWeight:
        """Return the weight with the outputs of even number first."""
        rows = torch.arange(len(self.numbers)).view(-1, 2).t().flatten()
        zero = None if self.zero is None else self.zero[rows]
        return replace(self, numbers=self.numbers[rows], scale=self.scale[rows], zero=zero)

    def take(self, shard: Shard) -> StoredWeight:
        """Return a rank's part. Raises ConfigurationError if ranks that split the inputs would also split groups."""
        if shard.group.size == 1:
            return self
        numbers = shard.take(self.numbers.view(torch.int8)).view(self.numbers.dtype)
        if shard.dim == 0:
            zero = None if self.zero is None else shard.take(self.zero)
            return replace(self, numbers=numbers, scale=shard.take(self.scale), zero=zero)
        if self.scale.shape[1] == 1:
            return replace(self, numbers=numbers)
        start, length = shard.unit * shard.group.share(shard.sections[0]).start, shard.length
        groups = self.scale.shape[1]
        if self.order is not None or start % self.group_size or length % self.group_size:
            sizes = [1] if self.order is not None else [size for size in range(1, groups + 1) if groups % size == 0]
            raise ConfigurationError(
                f"tensor_parallel: {shard.group.size} ranks would split quantization groups of this model "
                f"({groups} groups of {self.group_size} inputs in a layer). Use {' or '.join(map(str, sizes))}.",
                param="tensor_parallel",
            )
        span = (1, start // self.group_size, length // self.group_size)
        zero = None if self.zero is None else self.zero.narrow(*span)
        return replace(self, numbers=numbers, scale=self.scale.narrow(*span), zero=zero)

    def pack(self) -> QuantizedWeight:
        """Return the weight in the kernels' form. Raises ConfigurationError for sizes that no kernel supports."""
        scale = self.scale.t()
        if self.numbers.dtype == FP8:
            return fp8_weight(self.numbers, scale)
        weight = int4_weight if self.bits == 4 else int8_weight
        return weight(self.numbers, scale, None if self.zero is None else self.zero.t(), self.order)


class Format(Protocol):
    """A format of layers in checkpoints. Tensors are named by what follows the layer's name.

    Names with an underscore at the beginning belong to tensors of all experts.
    """

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the tensors in every layer. The first marks quantized layers; `weight` does so only in 8 bits."""
        ...

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of tensors that may be absent."""
        ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of tensors that are not read, such as scales of activations."""
        ...

    def decode(self, tensors: Mapping[str, Tensor], inputs: int) -> StoredWeight:
        """Decode the tensors of a layer with `inputs` inputs. Raises ModelLoadError for shapes that do not fit."""
        ...


def joined(parts: Sequence[StoredWeight]) -> StoredWeight:
    """Join weights along the outputs. Raises ModelLoadError if they are quantized differently."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts:
        is_same = (part.numbers.dtype, part.bits, part.scale.shape[1]) == (
            *(first.numbers.dtype, first.bits),
            first.scale.shape[1],
        )
        if not is_same or not _equal(part.order, first.order):
            raise ModelLoadError("layers that share their inputs must be quantized alike, with equal groups")
    zeros = [torch.zeros_like(part.scale, dtype=torch.int8) if part.zero is None else part.zero for part in parts]
    return replace(
        first,
        numbers=torch.cat([part.numbers.view(torch.int8) for part in parts]).view(first.numbers.dtype),
        scale=torch.cat([part.scale for part in parts]),
        zero=None if all(part.zero is None for part in parts) else torch.cat(zeros),
    )


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack rows of int32 words with numbers of 4 or 8 bits, from the lowest bits up, as uint8."""
    stored = words.contiguous().view(torch.uint8)
    return stored if bits == 8 else torch.stack((stored & 0xF, stored >> 4), dim=2).flatten(1)


def signed(numbers: Tensor, bits: int) -> Tensor:
    """Shift uint8 `numbers` of some bits, so that they are symmetric to 0: int8."""
    return (numbers.to(torch.int16) - (1 << bits - 1)).to(torch.int8)


def needed_zeros(zero: Tensor) -> Tensor | None:
    return zero if bool(zero.any()) else None


def spread(scale: Tensor, outputs: int, inputs: int, block: tuple[int, int] | None = None) -> Tensor:
    """Return `scale` as (outputs, groups) float32. It may be stored per tensor, output, group or `block` of the matrix.

    Raises ModelLoadError for another shape.
    """
    scale = scale.float()
    if scale.numel() == 1 and (block is None or scale.dim() < 2):
        return scale.reshape(1, 1).repeat(outputs, 1)
    if scale.dim() == 1:
        scale = scale[:, None]
    if block is not None and scale.shape == (-(-outputs // block[0]), -(-inputs // block[1])):
        size = math.gcd(inputs, block[1])  # smaller than the block if the last block is
        columns = torch.arange(inputs // size) * size // block[1]
        return scale.repeat_interleave(block[0], 0)[:outputs, columns]
    if scale.dim() == 2 and len(scale) == outputs and inputs % scale.shape[1] == 0:
        return scale
    raise ModelLoadError(f"a scale of shape {tuple(scale.shape)} does not fit {outputs} outputs and {inputs} inputs")


def order_of(group_index: Tensor, groups: int) -> Tensor | None:
    """Return the order of inputs that makes groups consecutive, for the group of each input; None if they are.

    Raises ModelLoadError if groups differ in size.
    """
    index = group_index.long()
    counts = torch.bincount(index, minlength=groups) if not (index < 0).any() else index[:0]
    if len(counts) != groups or not (counts == len(index) // groups).all():
        raise ModelLoadError(f"{len(index)} inputs are not in {groups} groups of one size (g_idx)")
    order = torch.argsort(index, stable=True)
    return None if torch.equal(order, torch.arange(len(index))) else order


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
