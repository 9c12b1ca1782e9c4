"""Blocks of GGUF files (llama.cpp): 4 to 8 bits in groups of 32 or 16, with scales and minima.

Blocks of 256 inputs ("K") have integer scales and minima, which are multiplied by two factors of the block. Layouts:
`gguf-py/gguf/quants.py` in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .format import StoredWeight


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of blocks, `size` bytes each: `weight` (outputs, bytes) uint8."""

    size: int
    decode_blocks: Callable[[Tensor], StoredWeight]
    required: tuple[str, ...] = ("weight",)
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def decode(self, tensors: Mapping[str, Tensor], inputs: int) -> StoredWeight:
        del inputs  # whole blocks
        rows = tensors["weight"]
        return self.decode_blocks(rows.view(len(rows), -1, self.size))


def _simple(bits: int, *, minimum: bool = False) -> Callable[[Tensor], StoredWeight]:
    """Return the decoder of blocks of 32 inputs: a scale, perhaps a minimum, perhaps the fifth bits, and numbers."""

    def decode(blocks: Tensor) -> StoredWeight:
        start = 4 if minimum else 2
        if bits == 8:
            return StoredWeight(_flat(blocks[..., start:]), _half(blocks, 0))
        numbers = _nibbles(blocks[..., -16:])
        if bits == 5:
            numbers |= _FIFTH_BITS[blocks[..., start : start + 4].long()].view(torch.uint8)
        if not minimum:
            numbers -= 1 << bits - 1
        low = _half(blocks, 2) if minimum else None
        return StoredWeight(_flat(numbers), _half(blocks, 0), bits=4 if bits == 4 else 8, minimum=low)

    return decode


def _q4_k(blocks: Tensor) -> StoredWeight:
    return _with_minima(blocks, _nibbles(blocks[..., 16:].unflatten(2, (4, 32))).flatten(2), 4)


def _q5_k(blocks: Tensor) -> StoredWeight:
    low = _nibbles(blocks[..., 48:].unflatten(2, (4, 32))).flatten(2)
    return _with_minima(blocks, low | _fields(blocks[..., 16:48], range(8), 1, to=4).flatten(2), 8)


def _q6_k(blocks: Tensor) -> StoredWeight:
    low = _nibbles(blocks[..., :128].unflatten(2, (2, 64)))
    high = _fields(blocks[..., 128:192].unflatten(2, (2, 32)), range(0, 8, 2), 3, to=4)
    numbers = (low.flatten(2) | high.flatten(2)) - 32
    scale = blocks[..., 192:208].flatten(1).view(torch.int8)
    return StoredWeight(_flat(numbers), scale, scale_factor=_half(blocks, 208))


def _with_minima(blocks: Tensor, numbers: Tensor, bits: int) -> StoredWeight:
    """Decode the common beginning of Q4_K and Q5_K: two factors, and eight scales and minima of six bits."""
    low, mid, high = blocks[..., 4:16].unflatten(2, (3, 4)).unbind(2)
    scale = torch.cat((low & 63, high & 0xF | low >> 6 << 4), 2)
    minimum = torch.cat((mid & 63, high >> 4 | mid >> 6 << 4), 2)
    return StoredWeight(
        _flat(numbers),
        _flat(scale),
        bits=bits,
        minimum=_flat(minimum),
        scale_factor=_half(blocks, 0),
        minimum_factor=-_half(blocks, 2),
    )


def _nibbles(stored: Tensor) -> Tensor:
    """Return the low four bits of the last dimension, then the high ones."""
    return _fields(stored, range(0, 8, 4), 0xF).flatten(-2)


def _fields(stored: Tensor, shifts: range, mask: int, *, to: int = 0) -> Tensor:
    """Return the bits of `mask` at each of the `shifts`, moved up `to` a bit: (..., shifts, bytes) uint8.

    Eight bytes at once, because torch shifts single bytes slowly.
    """
    words, masks = stored.contiguous().view(torch.int64), int.from_bytes(bytes([mask]) * 8)
    return torch.stack([(words >> shift & masks) << to for shift in shifts], -2).view(torch.uint8)


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(2)


def _flat(numbers: Tensor) -> Tensor:
    """Return numbers of blocks as (outputs, numbers) int8."""
    return numbers.flatten(1).view(torch.int8)


#: The bits of each byte, from the lowest up, as the fifth bits of eight numbers.
_FIFTH_BITS = torch.tensor([sum((byte >> bit & 1) << 8 * bit + 4 for bit in range(8)) for byte in range(256)])

#: By ggml's ids of types: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K.
GGUF_BLOCKS: Mapping[int, Blocks] = {
    2: Blocks(18, _simple(4)),
    3: Blocks(20, _simple(4, minimum=True)),
    6: Blocks(22, _simple(5)),
    7: Blocks(24, _simple(5, minimum=True)),
    8: Blocks(34, _simple(8)),
    12: Blocks(144, _q4_k),
    13: Blocks(176, _q5_k),
    14: Blocks(210, _q6_k),
}
