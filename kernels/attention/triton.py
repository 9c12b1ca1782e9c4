"""Paged attention in Triton: prefill chunks, decodes and drafts to verify in one launch (see `metadata`).

A program's tile holds the query heads of one KV head for a few tokens of one sequence, so that keys and values are read
once. It iterates over its keys with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022) in base 2.
"""

# Pyright cannot check the types inside Triton kernels.
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import AttentionShape
from .metadata import AttentionMetadata
from .types import ScoreOptions

_LOG2_E = math.log2(math.e)
_BLOCK_SPLITS = 16
_MIN_ROWS_TO_PEEL = 64

# Maximum score of a row that has seen no key yet: finite, so that it needs no special case.
_LOWEST_SCORE = tl.constexpr(-1.0e30)
_LOG2_E_OF_SINK = tl.constexpr(_LOG2_E)


@triton.jit(do_not_specialize=["window"])
def attend_kernel(
    out, partial, partial_lse, query, cache, work, blocks, sinks, query_stride, token_stride, score_scale, value_scale,
    window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, PEELED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Compute a tile or one split of it. Grid (kv_heads, splits): adjacent programs read heads of the same tokens.

    `query` (rows, heads, HEAD_DIM) has row stride `query_stride`; `out` has the same shape and is contiguous. `cache`
    is one layer, (blocks, BLOCK_SIZE, 2 * kv_heads, HEAD_DIM), with `token_stride` from token to token. The results of
    splits go to `partial` (rows, heads, HEAD_DIM) and `partial_lse` (rows, heads), float32. PEELED: a separate loop
    without masks handles the tiles of keys that all rows see. `sinks`: (heads,).
    """
    kv_head, kv_heads = tl.program_id(0), tl.num_programs(0)
    item = work + tl.program_id(1) * 8
    num_rows = tl.load(item + 2)
    if num_rows == 0:
        return
    table, first_row, position = tl.load(item), tl.load(item + 1), tl.load(item + 3)
    first_key, end_key, partial_row = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)

    rows = tl.arange(0, BLOCK_M)
    token, head = rows // GROUP, kv_head * GROUP + rows % GROUP
    real = token < num_rows
    dims = tl.arange(0, PADDED_DIM)
    inside = real[:, None] & (dims < HEAD_DIM)[None, :]
    query_rows = (first_row + token).to(tl.int64) * query_stride + head * HEAD_DIM
    q = tl.load(query + query_rows[:, None] + dims[None, :], mask=inside, other=0.0)

    positions = position + token
    keys_of_head = cache + kv_head * HEAD_DIM
    last_position = position + num_rows - 1
    end_key = tl.minimum(end_key, last_position + 1)
    oldest = position - window + 1  # first key that the first row sees; blocks before this key may be freed
    if WINDOWED:
        first_key = tl.maximum(first_key, oldest // BLOCK_N * BLOCK_N)

    acc = tl.zeros([BLOCK_M, PADDED_DIM], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], _LOWEST_SCORE, dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    masked_from = first_key
    if PEELED:
        # All queries see the keys up to the first query's position and in the last query's window: these need no mask.
        masked_from = tl.maximum(tl.minimum(end_key, position + 1) // BLOCK_N * BLOCK_N, first_key)
        plain_from = first_key
        if WINDOWED:
            plain_from = tl.cdiv(tl.maximum(last_position - window + 1, first_key), BLOCK_N) * BLOCK_N
            plain_from = tl.minimum(plain_from, masked_from)
            acc, row_max, row_sum = _attend_inner(
                acc, row_max, row_sum, q, positions, keys_of_head, kv_heads * HEAD_DIM, blocks + table, token_stride,
                first_key, plain_from, score_scale, window, oldest,
                HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, True, WINDOWED,
            )  # fmt: skip
        acc, row_max, row_sum = _attend_inner(
            acc, row_max, row_sum, q, positions, keys_of_head, kv_heads * HEAD_DIM, blocks + table, token_stride,
            plain_from, masked_from, score_scale, window, oldest,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, False, WINDOWED,
        )  # fmt: skip
    acc, row_max, row_sum = _attend_inner(
        acc, row_max, row_sum, q, positions, keys_of_head, kv_heads * HEAD_DIM, blocks + table, token_stride,
        masked_from, end_key, score_scale, window, oldest,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, True, WINDOWED,
    )  # fmt: skip

    if HAS_SINKS:  # without effect where splits are merged, which adds the sinks
        sink = tl.where(partial_row < 0, tl.load(sinks + head, mask=real, other=0.0), _LOWEST_SCORE)
        alpha, row_sum = _with_sink(row_max, row_sum, sink)
        acc = acc * alpha[:, None]
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)  # a row that sees no key gets zeros
    acc = acc * (value_scale / row_sum)[:, None]
    heads = kv_heads * GROUP
    if partial_row < 0:
        target = ((first_row + token).to(tl.int64) * heads + head) * HEAD_DIM
        tl.store(out + target[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=inside)
    else:
        target = (partial_row + token).to(tl.int64) * heads + head
        tl.store(partial + target[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
        tl.store(partial_lse + target, row_max + tl.log2(row_sum), mask=real)


@triton.jit
def _attend_inner(
    acc, row_max, row_sum, q, positions, keys_of_head, to_values, table, token_stride, first, end, score_scale,
    window, oldest,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over the keys `first` to `end - 1`; `acc` and `row_sum` are in units of 2**`row_max`.

    `first` is a multiple of BLOCK_N; keys before `oldest` are not read. Without MASKED, every row sees all keys, and
    `end` is a multiple of BLOCK_N too.
    """
    dims = tl.arange(0, PADDED_DIM)
    in_tile = tl.arange(0, BLOCK_N)
    block = _block(table, first, end, BLOCK_SIZE, BLOCK_N)
    for start in range(first, end, BLOCK_N):
        keys = start + in_tile
        offset = (block * BLOCK_SIZE + keys % BLOCK_SIZE).to(tl.int64) * token_stride
        # The block number is loaded one tile ahead, so that the loads of keys do not wait for this number.
        block = _block(table, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        readable = tl.full([BLOCK_N, PADDED_DIM], True, tl.int1)
        if PADDED_DIM != HEAD_DIM:
            readable = readable & (dims < HEAD_DIM)[None, :]
        if MASKED:
            readable = readable & (keys < end)[:, None]  # beyond the end there may be NaN, and 0 * NaN is NaN
            if WINDOWED:
                readable = readable & (keys >= oldest)[:, None]
        place = keys_of_head + offset[:, None] + dims[None, :]
        if MASKED or PADDED_DIM != HEAD_DIM:
            k = tl.load(place, mask=readable, other=0.0)
            v = tl.load(place + to_values, mask=readable, other=0.0)
        else:
            k = tl.load(place)
            v = tl.load(place + to_values)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if MASKED:
            age = positions[:, None] - keys[None, :]
            visible = age >= 0  # excludes keys from `end` on too, as all splits but the last end at a tile border
            if WINDOWED:
                # As unsigned numbers, negative ages exceed every window: this saves a comparison and registers.
                visible = age.to(tl.uint32, bitcast=True) < window.to(tl.uint32)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * score_scale)
        probabilities = tl.exp2(scores * score_scale - new_max[:, None])  # scaled and subtracted in one instruction
        alpha = tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(probabilities, axis=1)
        acc = acc * alpha[:, None]
        acc = tl.dot(probabilities.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _with_sink(row_max, row_sum, sink):
    """Return a factor of all results so far, and the sum of the softmax, which the sink joins."""
    sink *= _LOG2_E_OF_SINK
    new_max = tl.maximum(row_max, sink)
    alpha = tl.exp2(row_max - new_max)
    return alpha, row_sum * alpha + tl.exp2(sink - new_max)


@triton.jit
def _block(table, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the block number of each key of a tile, or one number if all share a block. Keys from `end` on get 0."""
    if BLOCK_N <= BLOCK_SIZE:
        block = tl.load(table + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        block = tl.load(table + keys // BLOCK_SIZE, mask=keys < end, other=0)
    return block


@triton.jit
def merge_kernel(
    out, partial, partial_lse, merges, sinks,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one row and head, weighted by their log-sum-exp. Grid (heads, merged rows)."""
    head, heads = tl.program_id(0), tl.num_programs(0)
    item = merges + tl.program_id(1) * 4
    splits = tl.load(item + 3)
    if splits == 0:
        return
    row, first, step = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    dims = tl.arange(0, PADDED_DIM)
    acc = tl.zeros([PADDED_DIM], dtype=tl.float32)
    row_max = _LOWEST_SCORE
    row_sum = 0.0
    for start in range(0, splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        place = (first + split * step).to(tl.int64) * heads + head
        logs = tl.load(partial_lse + place, mask=split < splits, other=float("-inf"))
        readable = (split < splits)[:, None] & (dims < HEAD_DIM)[None, :]
        values = tl.load(partial + place[:, None] * HEAD_DIM + dims[None, :], mask=readable, other=0.0)
        new_max = tl.maximum(row_max, tl.max(logs, axis=0))
        shares = tl.exp2(logs - new_max)
        alpha = tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(shares, axis=0)
        acc = acc * alpha + tl.sum(values * shares[:, None], axis=0)
        row_max = new_max
    if HAS_SINKS:
        alpha, row_sum = _with_sink(row_max, row_sum, tl.load(sinks + head))
        acc = acc * alpha
    target = (row.to(tl.int64) * heads + head) * HEAD_DIM
    tl.store(out + target + dims, (acc / row_sum).to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def attend(
    query: Tensor, cache: Tensor, metadata: AttentionMetadata, shape: AttentionShape, options: ScoreOptions
) -> Tensor:
    """Compute causal attention of each span over its sequence. Rows of padding get zeros.

    `query` (rows, heads, head_dim), with any row stride; `cache` (blocks, block_size, 2 * kv_heads, head_dim), in the
    query's dtype or float8_e4m3fn.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    launch = metadata.launch
    sinks = query if options.sinks is None else options.sinks
    partial = query.new_empty((metadata.partial_rows, *query.shape[1:]), dtype=torch.float32)
    partial_lse = query.new_empty((metadata.partial_rows, shape.heads), dtype=torch.float32)
    attend_kernel[(shape.kv_heads, len(metadata.work))](
        out,
        partial,
        partial_lse,
        query,
        cache,
        metadata.work,
        metadata.blocks,
        sinks,
        query.stride(0),
        cache.stride(1),
        options.scale * options.key_scale * _LOG2_E,
        options.value_scale,
        options.window or 0,
        GROUP=shape.group,
        HEAD_DIM=shape.head_dim,
        PADDED_DIM=shape.padded_dim,
        BLOCK_SIZE=shape.block_size,
        WINDOWED=options.window is not None,
        PEELED=launch.tiles["BLOCK_M"] >= _MIN_ROWS_TO_PEEL,
        HAS_SINKS=options.sinks is not None,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **launch.tiles,
    )
    if metadata.partial_rows:
        merge_kernel[(shape.heads, len(metadata.merges))](
            out,
            partial,
            partial_lse,
            metadata.merges,
            sinks,
            HEAD_DIM=shape.head_dim,
            PADDED_DIM=shape.padded_dim,
            BLOCK_SPLITS=_BLOCK_SPLITS,
            HAS_SINKS=options.sinks is not None,
            num_warps=4,
        )
    return out
