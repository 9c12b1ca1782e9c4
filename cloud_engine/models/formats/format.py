"""The protocol of a checkpoint format, and the common form into which formats decode a layer's weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ....kernels.linear.quantization import fp8_weight, int4_weight, int8_weight
from ....kernels.linear.types import FP8, QuantizedWeight, term_values
from ....protocol.errors import ConfigurationError, ModelLoadError
from ..sharding import Shard

_TERMS = ("scale", "zero", "minimum", "scale_factor", "minimum_factor")


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantized matrix: weight = (number - zero) * scale + minimum, with terms per output and group of inputs."""

    # (outputs, inputs) int8 or FP8.
    numbers: Tensor
    # (outputs, groups) float32 or float16; int8 if there are factors.
    scale: Tensor
    # (outputs, groups) int8; None if all are 0.
    zero: Tensor | None = None
    # Bits per number: 8, or 4 for numbers from -8 to 7, or from 0 to 15 if there are minima.
    bits: int = 8
    # (inputs,) int64: the input of each column; None if in order. Its groups would be scattered otherwise.
    order: Tensor | None = None
    # (outputs, groups) in the type of `scale`; None if all are 0.
    minimum: Tensor | None = None
    # (outputs, larger groups) float16: factors of `scale` and of `minimum`. None: 1.
    scale_factor: Tensor | None = None
    minimum_factor: Tensor | None = None

    @property
    def form(self) -> tuple[object, ...]:
        """Properties that joined weights have in common, besides the order."""
        factors = 0 if self.scale_factor is None else self.scale_factor.shape[1]
        begins_at_0 = self.bits == 4 and self.minimum is not None
        return self.numbers.dtype, self.bits, begins_at_0, self.scale.dtype, self.scale.shape[1], factors

    def like(self, outputs: int) -> StoredWeight:
        """Return a weight of the same form with another number of outputs, whose memory is not initialised."""
        rows = self.numbers.new_empty(outputs, self.numbers.shape[1])
        return self._with_terms(lambda _, term: term.new_empty(outputs, term.shape[1]), numbers=rows)

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
            return self._with_terms(lambda _, term: shard.take(term), numbers=numbers)
        start, inputs = shard.unit * shard.group.share(shard.sections[0]).start, self.numbers.shape[1]
        factor = self.scale_factor
        groups = (self.scale if factor is None or factor.shape[1] == 1 else factor).shape[1]
        size = inputs // groups
        if groups > 1 and (self.order is not None or start % size or shard.length % size):
            sizes = [1] if self.order is not None else [size for size in range(1, groups + 1) if groups % size == 0]
            raise ConfigurationError(
                f"tensor_parallel: {shard.group.size} ranks would split quantization groups of this model "
                f"({groups} groups of {size} inputs in a layer). Use {' or '.join(map(str, sizes))}.",
                param="tensor_parallel",
            )

        def part(_: str, term: Tensor) -> Tensor:
            size = inputs // term.shape[1]
            return term if size == inputs else term.narrow(1, start // size, shard.length // size)

        return self._with_terms(part, numbers=numbers)

    def widened(self, groups: int, *, keep_factors: bool) -> StoredWeight:
        """Return the same weight in 8 bits and smaller groups, with or without factors."""

        def wide(name: str, term: Tensor) -> Tensor:
            if name.endswith("factor"):
                return term
            if not keep_factors and name != "zero":
                term = term_values(term, getattr(self, f"{name}_factor"), 1)
            return term.repeat_interleave(groups // term.shape[1], 1)

        wider = self._with_terms(wide, bits=8)
        return wider if keep_factors else replace(wider, scale_factor=None, minimum_factor=None)

    def pack(self) -> QuantizedWeight:
        """Return the weight in the kernels' form. Raises ConfigurationError for sizes that no kernel supports."""
        if self.numbers.dtype == FP8:
            return fp8_weight(self.numbers, self.scale.t())
        rows: dict[str, Any] = {name: getattr(self, name) for name in _TERMS}
        terms: dict[str, Any] = {name: None if row is None else row.t() for name, row in rows.items()}
        return (int4_weight if self.bits == 4 else int8_weight)(self.numbers, order=self.order, **terms)

    def _with_terms(self, change: Callable[[str, Tensor], Tensor], **fields: Any) -> StoredWeight:
        """Return this weight with changed terms and other `fields`."""
        terms: dict[str, Tensor | None] = {name: getattr(self, name) for name in _TERMS}
        changed = {name: change(name, term) for name, term in terms.items() if term is not None}
        return replace(self, **changed, **fields)


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
    if any(part.form != first.form or not _equal(part.order, first.order) for part in parts):
        raise ModelLoadError("layers that share their inputs must be quantized alike, with equal groups")

    def whole(name: str) -> Tensor | None:
        terms: list[Tensor | None] = [getattr(part, name) for part in parts]
        like = next((term for term in terms if term is not None), None)
        if like is None:
            return None
        pairs = zip(parts, terms, strict=True)
        rows = [like.new_zeros(len(part.numbers), like.shape[1]) if term is None else term for part, term in pairs]
        return torch.cat(rows)

    numbers = torch.cat([part.numbers.view(torch.int8) for part in parts]).view(first.numbers.dtype)
    return replace(first, numbers=numbers, **{name: whole(name) for name in _TERMS})


def assembled(pieces: Iterable[StoredWeight], outputs: int) -> StoredWeight:
    """Join pieces of a weight with a number of `outputs` in memory of its own, so that each piece can be freed."""
    whole, start = None, 0
    for piece in pieces:
        whole = piece.like(outputs) if whole is None else whole
        end = start + len(piece.numbers)
        for name in ("numbers", *_TERMS):
            if (part := getattr(piece, name)) is not None:
                getattr(whole, name)[start:end] = part
        start = end
    if whole is None:
        raise ModelLoadError("it has no rows")
    return whole


def alike(parts: Sequence[StoredWeight]) -> Sequence[StoredWeight]:
    """Return integer weights in one form, so that they can be joined: in 8 bits if they differ."""
    if len({part.form for part in parts}) == 1:
        return parts
    factors = {None if part.scale_factor is None else part.scale_factor.shape[1] for part in parts}
    groups = max(part.scale.shape[1] for part in parts)
    return [part.widened(groups, keep_factors=len(factors) == 1) for part in parts]


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
