"""Norm, rotation and storing of heads in Triton: one launch that reads the projection once."""

# Pyright cannot check the types inside Triton kernels.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..runtime.numeric import FP8_MAX, next_power_of_2
from .types import HeadTransform, Rotation, check_kv_write

_ELEMENTS = 1024  # elements per program: 8 in each of 128 threads


@triton.jit
def write_kv_kernel(
    projected,
    cache,
    slots,
    cosine,
    sine,
    query_norm,
    key_norm,
    row_stride,
    heads,
    kv_heads,
    eps,
    key_factor,
    value_factor,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED_PAIRS: tl.constexpr,
    PADDED_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    ROTATED: tl.constexpr,
    NORMED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Norm, rotate and store heads; grid (rows, groups of heads). A head is read in three parts, so that a thread has
    both elements of a pair: the first elements of the rotated pairs, the second elements, and the rest of the head.

    `heads`: number of query heads, followed by kv_heads key heads and kv_heads value heads. LARGEST: largest value of
    the cache's dtype, 0 for no limit.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    exists = head < heads + 2 * kv_heads
    is_query, is_value = head < heads, head >= heads + kv_heads
    slot = tl.load(slots + row).to(tl.int64)

    pair = tl.arange(0, PADDED_PAIRS)
    inside = exists[:, None] & (pair < PAIRS)[None, :]
    source = projected + row * row_stride + head[:, None] * HEAD_DIM
    raw_first = tl.load(source + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    raw_second = tl.load(source + PAIRS + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    first, second = raw_first, raw_second
    if PADDED_REST > 0:
        dim = 2 * PAIRS + tl.arange(0, PADDED_REST)
        inside_rest = exists[:, None] & (dim < HEAD_DIM)[None, :]
        rest = tl.load(source + dim[None, :], mask=inside_rest, other=0.0).to(tl.float32)
        raw_rest = rest

    if NORMED:
        squares = tl.sum(first * first + second * second, axis=1)
        if PADDED_REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        shrink = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first *= shrink * _norm_weight(query_norm, key_norm, is_query, pair, PAIRS, UNIT_OFFSET)
        second *= shrink * _norm_weight(query_norm + PAIRS, key_norm + PAIRS, is_query, pair, PAIRS, UNIT_OFFSET)
        if PADDED_REST > 0:
            rest *= shrink * _norm_weight(query_norm, key_norm, is_query, dim, HEAD_DIM, UNIT_OFFSET)
    if ROTATED:
        cos = tl.load(cosine + row * PAIRS + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sine + row * PAIRS + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :]
        first, second = first * cos - second * sin, second * cos + first * sin

    if NORMED or ROTATED:
        queries = is_query[:, None]
        tl.store(source + pair[None, :], first.to(projected.dtype.element_ty), mask=inside & queries)
        tl.store(source + PAIRS + pair[None, :], second.to(projected.dtype.element_ty), mask=inside & queries)
        if PADDED_REST > 0:
            tl.store(source + dim[None, :], rest.to(projected.dtype.element_ty), mask=inside_rest & queries)

    values = is_value[:, None]
    first_stored = tl.where(slot < 0, heads + 2 * kv_heads, heads)  # a row without a slot stores no head
    stored = (exists & (head >= first_stored))[:, None]
    target = cache + (slot * 2 * kv_heads + head - heads)[:, None] * HEAD_DIM
    factor = tl.where(values, value_factor, key_factor)
    first = _cached(tl.where(values, raw_first, first) * factor, cache, LARGEST)
    second = _cached(tl.where(values, raw_second, second) * factor, cache, LARGEST)
    tl.store(target + pair[None, :], first, mask=inside & stored)
    tl.store(target + PAIRS + pair[None, :], second, mask=inside & stored)
    if PADDED_REST > 0:
        rest = _cached(tl.where(values, raw_rest, rest) * factor, cache, LARGEST)
        tl.store(target + dim[None, :], rest, mask=inside_rest & stored)


@triton.jit
def _norm_weight(query_norm, key_norm, is_query, dim, END: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    of_query = tl.load(query_norm + dim, mask=dim < END, other=0.0).to(tl.float32)
    of_key = tl.load(key_norm + dim, mask=dim < END, other=0.0).to(tl.float32)
    weight = tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
    if UNIT_OFFSET:
        weight += 1.0
    return weight


@triton.jit
def _cached(values, cache, LARGEST: tl.constexpr):
    if LARGEST > 0:
        values = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
    return values.to(cache.dtype.element_ty)


def launch_write_kv_(
    projected: Tensor, cache: Tensor, slots: Tensor, transform: HeadTransform, rotation: Rotation | None
) -> None:
    """Norm and rotate the queries in place; norm, rotate and store the keys; store the values.

    `projected` (rows, heads + 2 * kv_heads, head_dim): queries, keys and values of each row; rows may have any stride.
    The keys and values in it are undefined afterwards. `cache` (blocks, block_size, 2 * kv_heads, head_dim): same dtype
    or float8_e4m3fn. `slots` (rows,) int32: block * block_size + offset, negative for rows that are not stored.
    """
    check_kv_write(projected, cache, slots, rotation)
    if not cache.is_contiguous():
        raise ConfigurationError("KV write: the cache must be contiguous.")
    rows, all_heads, head_dim = projected.shape
    if not rows:
        return
    kv_heads = cache.shape[2] // 2
    pairs = head_dim // 2 if rotation is None else rotation.pairs
    rest = head_dim - 2 * pairs
    block_heads = max(1, min(_ELEMENTS // next_power_of_2(head_dim), next_power_of_2(all_heads)))
    norms = transform.norms
    write_kv_kernel[(rows, triton.cdiv(all_heads, block_heads))](
        projected,
        cache,
        slots,
        projected if rotation is None else rotation.cosine.contiguous(),
        projected if rotation is None else rotation.sine.contiguous(),
        projected if norms is None else norms.query,
        projected if norms is None else norms.key,
        projected.stride(0),
        all_heads - 2 * kv_heads,
        kv_heads,
        0.0 if norms is None else norms.eps,
        1.0 / transform.key_scale,
        1.0 / transform.value_scale,
        HEAD_DIM=head_dim,
        PAIRS=pairs,
        PADDED_PAIRS=next_power_of_2(pairs),
        PADDED_REST=next_power_of_2(rest) if rest else 0,
        BLOCK_HEADS=block_heads,
        ROTATED=rotation is not None,
        NORMED=norms is not None,
        UNIT_OFFSET=norms is not None and norms.unit_offset,
        LARGEST=FP8_MAX if cache.dtype == torch.float8_e4m3fn else 0.0,
        num_warps=4,
    )
