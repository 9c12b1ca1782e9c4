"""Heads on their way from the projection into the paged KV cache, in one pass over them."""

from __future__ import annotations

from torch import Tensor

from ..runtime.backend import uses_triton
from .reference import write_kv_reference_
from .types import HeadTransform, Rotation


def write_kv_(
    projected: Tensor, cache: Tensor, slots: Tensor, transform: HeadTransform, rotation: Rotation | None
) -> None:
    """Norm and rotate the queries in place, norm, rotate and store the keys, store the values.

    `projected` (rows, heads + 2 * kv_heads, head_dim): queries, keys, values of each row, rows any distance apart. Its
    keys and values are undefined afterwards. `cache` (blocks, block_size, 2 * kv_heads, head_dim) in the same dtype
    or float8_e4m3fn. `slots` (rows,) int32: block * block_size + offset, negative for rows that are stored nowhere.
    """
    if uses_triton(projected):
        from .triton import launch_write_kv_

        launch_write_kv_(projected, cache, slots, transform, rotation)
    else:
        write_kv_reference_(projected, cache, slots, transform, rotation)
