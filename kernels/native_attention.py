"""Attention over a paged KV cache in C, for CPUs: reads keys and values where they lie, in blocks.

The plain torch one (`paged_attention.py`) has to gather them first and multiplies with padding; it is the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from .attention_plan import QuerySpan
from .native_library import load
from .paged_attention import LayerAttention

_LANES, _MOST_DIM = 16, 256  # of native/attention.c


class _AttentionCall(ctypes.Structure):
    """`AttentionCall` of native/attention.c, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "out", "cache", "sequences", "tables")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("query_stride", "num_sequences", "most_queries", "heads", "kv_heads", "block_size", "head_dim"),
                *("window", "num_threads", "is_bf16"),
            )
        ),
        ("scale", ctypes.c_double),
    )


class _StoreCall(ctypes.Structure):
    """`StoreCall` of native/attention.c, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("key_value", "cache", "slots")),
        *(
            (name, ctypes.c_int64)
            for name in ("stride", "rows", "parts", "block_size", "bytes", "element_bytes", "num_threads")
        ),
    )


def can_attend(cache: Tensor) -> str | None:
    """Why the C kernel cannot serve `cache` (layers, blocks, 2 * kv_heads, block_size, head_dim); None if it can."""
    block_size, head_dim = cache.shape[-2:]
    if cache.device.type != "cpu":
        return f"the model is on {cache.device.type}"
    if cache.dtype not in (torch.float32, torch.bfloat16):
        return f"the cache is {cache.dtype}"
    if head_dim % _LANES or head_dim > _MOST_DIM or block_size % _LANES:
        return f"head_dim {head_dim} and block_size {block_size} are not both multiples of {_LANES}"
    return None if load() is not None else "it could not be compiled"


class NativeAttention:
    """One forward pass's attention, as `PagedAttention` gives it.

    A row's result depends, to the last bit, on its own sequence alone.
    """

    def __init__(self, cache: Tensor, spans: Sequence[QuerySpan], slot_mapping: Tensor, *, shared: int) -> None:
        library = load()
        assert library is not None, "ask can_attend first"
        self._library = library
        self._cache = cache
        self._slots = slot_mapping
        self._sequences, self._tables = _sequences(spans)
        _, _, parts, block_size, head_dim = cache.shape
        threads = torch.get_num_threads()
        self._attend = _AttentionCall(
            sequences=self._sequences.ctypes.data,
            tables=self._tables.ctypes.data,
            num_sequences=len(spans),
            most_queries=max(span.length for span in spans),
            heads=shared * parts // 2,
            kv_heads=parts // 2,
            block_size=block_size,
            head_dim=head_dim,
            num_threads=threads,
            is_bf16=cache.dtype == torch.bfloat16,
        )
        self._store = _StoreCall(
            slots=slot_mapping.data_ptr(),
            rows=len(slot_mapping),
            parts=parts,
            block_size=block_size,
            bytes=head_dim * cache.element_size(),
            element_bytes=cache.element_size(),
            num_threads=threads,
        )

    def attend(self, layer: LayerAttention, query: Tensor, key_value: Tensor) -> Tensor:
        """Store `key_value` (rows, 2 * kv_heads, head_dim), attend causally with `query` (rows, heads, head_dim).

        Rows behind those of the spans are padding: nothing is stored of them, and they get zeros.
        """
        out = query.new_empty(query.shape)
        out[len(self._slots) :] = 0
        store, attend = self._store, self._attend
        store.cache = attend.cache = self._cache[layer.index].data_ptr()
        store.key_value, store.stride = _rows(key_value)
        attend.query, attend.query_stride = _rows(query)
        attend.out, attend.window, attend.scale = out.data_ptr(), layer.window or 0, layer.scale
        self._library.store_key_values(ctypes.byref(store))
        if self._library.paged_attention(ctypes.byref(attend)):
            raise RuntimeError(f"the C kernel does not take a cache of {tuple(self._cache.shape)}")
        return out


def _rows(heads: Tensor) -> tuple[int, int]:
    """Address and distance of the rows of (rows, heads, head_dim), whose heads lie one behind the other."""
    if heads.stride()[1:] != (heads.shape[2], 1):
        raise ValueError(f"heads must be contiguous within a row, got strides {heads.stride()}")
    return heads.data_ptr(), heads.stride(0)


def _sequences(spans: Sequence[QuerySpan]) -> tuple[np.ndarray, np.ndarray]:
    """(n, 4): first row, first position, queries, where its table begins; and all block tables, one after the other."""
    lengths = np.fromiter((span.length for span in spans), dtype=np.int64)
    sizes = np.fromiter((len(span.block_table) for span in spans), dtype=np.int64)
    starts = np.fromiter((span.start for span in spans), dtype=np.int64)
    columns = (lengths.cumsum() - lengths, starts, lengths, sizes.cumsum() - sizes)
    tables = np.fromiter(chain.from_iterable(span.block_table for span in spans), dtype=np.int64, count=sizes.sum())
    return np.stack(columns, axis=1), tables
