"""Norm, rotation and storing of heads in plain torch: the reference for the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.numeric import FP8_MAX
from .types import HeadNorms, HeadTransform, Rotation, check_kv_write


def write_kv_reference_(
    projected: Tensor, cache: Tensor, slots: Tensor, transform: HeadTransform, rotation: Rotation | None
) -> None:
    """Norm, rotate and store the heads. Computes everything in float32 and rounds once at the end."""
    check_kv_write(projected, cache, slots, rotation)
    kv_heads = cache.shape[2] // 2
    query, key, value = projected.split((projected.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    wide_query, wide_key = query.float(), key.float()
    if transform.norms is not None:
        wide_query = _normed(wide_query, transform.norms.query, transform.norms)
        wide_key = _normed(wide_key, transform.norms.key, transform.norms)
    if rotation is not None:
        wide_query, wide_key = _rotated(wide_query, rotation), _rotated(wide_key, rotation)
    query.copy_(wide_query)
    stored = slots >= 0
    rows = torch.cat((wide_key * (1.0 / transform.key_scale), value.float() * (1.0 / transform.value_scale)), dim=1)[
        stored
    ]
    if cache.dtype == torch.float8_e4m3fn:
        rows = rows.clamp(-FP8_MAX, FP8_MAX)
    used_slots, block_size = slots[stored].long(), cache.shape[1]
    cache[used_slots // block_size, used_slots % block_size] = rows.to(cache.dtype)


def _normed(heads: Tensor, weight: Tensor, norms: HeadNorms) -> Tensor:
    wide = weight.float() + 1.0 if norms.unit_offset else weight.float()
    return heads * (heads.square().mean(-1, keepdim=True) + norms.eps).rsqrt() * wide


def _rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    pairs = rotation.pairs
    cosine, sine = rotation.cosine.float()[:, None], rotation.sine.float()[:, None]
    first, second, rest = heads.split((pairs, pairs, heads.shape[-1] - 2 * pairs), dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)
