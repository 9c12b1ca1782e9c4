"""What happens to the heads of a layer between projection and attention, in one pass over them.

Queries and keys are normed (where the model does that) and rotated by their positions; queries stay where they are,
keys and values go to the paged cache, in FP8 if that is what the cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..runtime.backend import uses_triton

#: The largest number of float8_e4m3fn.
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Rotation:
    """`cosine` and `sine` (rows, pairs) of each row's angles; dimension i is paired with i + pairs (Su et al. 2021, in
    Hugging Face's order). Dimensions from 2 * pairs on are not rotated.
    """

    cosine: Tensor
    sine: Tensor

    @property
    def pairs(self) -> int:
        return self.cosine.shape[-1]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm (Zhang & Sennrich 2019) over each head of queries and keys; weights (head_dim,).

    `unit_offset`: weights are stored less one (Gemma).
    """

    query: Tensor
    key: Tensor
    eps: float
    unit_offset: bool = False


@dataclass(frozen=True, slots=True)
class HeadRule:
    """What a layer does to its heads. The cache gets the keys over `key_scale` and the values over `value_scale`."""

    norms: HeadNorms | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0


def write_kv_(projected: Tensor, cache: Tensor, slots: Tensor, rule: HeadRule, rotation: Rotation | None) -> None:
    """Norm and rotate the queries in place, norm, rotate and store the keys, store the values.

    `projected` (rows, heads + 2 * kv_heads, head_dim): queries, keys, values of each row, rows any distance apart; what
    is left in its keys and values is undefined. `cache` (blocks, block_size, 2 * kv_heads, head_dim) in the same dtype
    or float8_e4m3fn. `slots` (rows,) int32: block * block_size + offset, negative for rows that are stored nowhere.
    """
    if uses_triton(projected):
        from .triton import write_kv_ as write_with_triton_

        write_with_triton_(projected, cache, slots, rule, rotation)
    else:
        write_kv_reference_(projected, cache, slots, rule, rotation)


def write_kv_reference_(
    projected: Tensor, cache: Tensor, slots: Tensor, rule: HeadRule, rotation: Rotation | None
) -> None:
    """In float32 throughout, rounded once at the end."""
    check_kv_write(projected, cache, slots, rotation)
    kv_heads = cache.shape[2] // 2
    query, key, value = projected.split((projected.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    wide_query, wide_key = query.float(), key.float()
    if rule.norms is not None:
        wide_query = _normed(wide_query, rule.norms.query, rule.norms)
        wide_key = _normed(wide_key, rule.norms.key, rule.norms)
    if rotation is not None:
        wide_query, wide_key = _rotated(wide_query, rotation), _rotated(wide_key, rotation)
    query.copy_(wide_query)
    stored = slots >= 0
    rows = torch.cat((wide_key * (1.0 / rule.key_scale), value.float() * (1.0 / rule.value_scale)), dim=1)[stored]
    if cache.dtype == torch.float8_e4m3fn:
        rows = rows.clamp(-FP8_MAX, FP8_MAX)
    kept, block_size = slots[stored].long(), cache.shape[1]
    cache[kept // block_size, kept % block_size] = rows.to(cache.dtype)


def _normed(heads: Tensor, weight: Tensor, norms: HeadNorms) -> Tensor:
    wide = weight.float() + 1.0 if norms.unit_offset else weight.float()
    return heads * (heads.square().mean(-1, keepdim=True) + norms.eps).rsqrt() * wide


def _rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    pairs = rotation.pairs
    cosine, sine = rotation.cosine.float()[:, None], rotation.sine.float()[:, None]
    first, second, rest = heads.split((pairs, pairs, heads.shape[-1] - 2 * pairs), dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)


def check_kv_write(projected: Tensor, cache: Tensor, slots: Tensor, rotation: Rotation | None) -> None:
    """Raises ConfigurationError for tensors that do not belong together; looks at no values."""
    rows, heads, head_dim = projected.shape
    problem = None
    if cache.shape[3] != head_dim or cache.shape[2] > heads:
        problem = f"a cache for heads {tuple(cache.shape[2:])} does not fit {heads} projected heads of {head_dim}"
    elif cache.dtype not in (projected.dtype, torch.float8_e4m3fn):
        problem = f"{projected.dtype} is not written to a cache of {cache.dtype}"
    elif slots.shape != (rows,):
        problem = f"{rows} rows need a slot each, got {tuple(slots.shape)}"
    elif projected.stride()[1:] != (head_dim, 1):
        problem = "the heads of each projected row must be contiguous"
    elif rotation is not None and (rotation.cosine.shape != rotation.sine.shape or len(rotation.cosine) != rows):
        problem = f"{rows} rows need angles each, got {tuple(rotation.cosine.shape)} and {tuple(rotation.sine.shape)}"
    elif rotation is not None and 2 * rotation.pairs > head_dim:
        problem = f"{rotation.pairs} pairs do not fit in heads of {head_dim}"
    if problem is not None:
        raise ConfigurationError(f"KV write: {problem}.")
