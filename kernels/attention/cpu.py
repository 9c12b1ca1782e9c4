"""Attention over a paged KV cache in C for CPUs, which reads keys and values directly from their blocks.

`torch_attention`, in contrast, copies keys and values first, and multiplies padding too.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..kv_cache.types import HeadNorms, Rotation, check_kv_write
from ..runtime.native_library import LANES, call_fields, load, loaded
from .ragged_batch import RaggedBatch
from .types import LayerAttention

_MAX_DIM = 256  # maximum head_dim, as in native/attention.c


class AttentionCall(ctypes.Structure):
    """The C struct `AttentionCall` of native/calls.h."""

    _fields_ = call_fields(
        "query out cache sequences tables sinks",
        "query_stride num_sequences max_queries heads kv_heads block_size head_dim window num_threads is_bf16",
        "scale",
    )


class HeadsCall(ctypes.Structure):
    """The C struct `HeadsCall` of native/calls.h."""

    _fields_ = call_fields(
        "projected cache slots cosine sine query_norm key_norm",
        "rows stride heads kv_heads block_size head_dim pairs unit_offset num_threads is_bf16",
        "eps",
    )


def why_not_native(device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int) -> str | None:
    """Return the reason why the C kernel does not support a cache with these properties, or None."""
    if device.type != "cpu":
        return f"the model is on {device.type}, not on a CPU"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the cache is in {dtype}, not in float32 or bfloat16"
    if head_dim % LANES or head_dim > _MAX_DIM or block_size % LANES:
        return (
            f"head_dim {head_dim} and block_size {block_size} must be multiples of {LANES}, and head_dim at most "
            f"{_MAX_DIM}"
        )
    return None if load() is not None else "the C kernel could not be compiled (see the log)"


class NativeAttention:
    """Attention of one forward pass. The result of a row is identical, bit by bit, in every batch."""

    def __init__(self, cache: Tensor, batch: RaggedBatch, *, group_size: int) -> None:
        self._library = loaded()
        self._cache = cache
        self._slots = torch.from_numpy(batch.slots())
        self.num_rows = batch.num_real_rows  # without padding
        self._blocks = batch.blocks
        self._sequences = np.stack((batch.first_row, batch.position, batch.rows, batch.table), axis=1)
        _, _, parts, block_size, head_dim = cache.shape
        self._heads = group_size * parts // 2
        same = {
            "heads": self._heads,
            "kv_heads": parts // 2,
            "block_size": block_size,
            "head_dim": head_dim,
            "num_threads": torch.get_num_threads(),
            "is_bf16": cache.dtype == torch.bfloat16,
        }
        self.heads_call = HeadsCall(cache=cache.data_ptr(), slots=self._slots.data_ptr(), rows=len(self._slots), **same)
        self.attention_call = AttentionCall(
            cache=cache.data_ptr(),
            sequences=self._sequences.ctypes.data,
            tables=self._blocks.ctypes.data,
            num_sequences=len(self._sequences) - 1,  # the last sequence is padding
            max_queries=int(batch.rows[:-1].max()),
            **same,
        )

    @property
    def num_layers(self) -> int:
        return len(self._cache)

    @property
    def layer_bytes(self) -> int:
        """Distance between two layers in the cache, in bytes."""
        return self._cache.stride(0) * self._cache.element_size()

    @property
    def dtype(self) -> torch.dtype:
        return self._cache.dtype

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a projected row (queries, keys and values), and elements of a result row."""
        head_dim = self._cache.shape[4]
        return (self._heads + self._cache.shape[2]) * head_dim, self._heads * head_dim

    def attend(
        self, layer: LayerAttention, projected: Tensor, rotation: Rotation | None, norms: HeadNorms | None = None
    ) -> Tensor:
        """Implement `Attention.attend`."""
        self._check(projected, rotation, norms)
        cache = self._cache[layer.index].data_ptr()
        write, attend = self.heads_call, self.attention_call
        write.cache, write.projected, write.stride = cache, projected.data_ptr(), projected.stride(0)
        if rotation is not None:
            write.cosine, write.sine = rotation.cosine.data_ptr(), rotation.sine.data_ptr()
        write.pairs = 0 if rotation is None else rotation.pairs
        write.query_norm = write.key_norm = None
        if norms is not None:
            write.query_norm, write.key_norm = norms.query.data_ptr(), norms.key.data_ptr()
            write.eps, write.unit_offset = norms.eps, norms.unit_offset
        self._library.write_heads(ctypes.byref(write))
        out = projected.new_empty((len(projected), self._heads, projected.shape[2]))
        if self.num_rows < len(out):
            out[self.num_rows :] = 0
        attend.cache, attend.query, attend.query_stride = cache, projected.data_ptr(), projected.stride(0)
        attend.out, attend.window, attend.scale = out.data_ptr(), layer.window or 0, layer.scale
        attend.sinks = None if layer.sinks is None else layer.sinks.data_ptr()
        if self._library.paged_attention(ctypes.byref(attend)):
            raise RuntimeError(f"the C kernel does not support a cache of {tuple(self._cache.shape)}")
        return out

    def _check(self, projected: Tensor, rotation: Rotation | None, norms: HeadNorms | None) -> None:
        """Check shapes and dtypes, because C would read and write past the end of tensors that do not fit."""
        check_kv_write(projected, self._cache[0].transpose(1, 2), self._slots, rotation)
        heads = self._heads + self._cache.shape[2]
        if projected.shape[1] != heads:
            raise ConfigurationError(f"Attention needs {heads} projected heads, got {projected.shape[1]}.")
        if norms is not None and not norms.query.dtype == norms.key.dtype == projected.dtype:
            raise ConfigurationError(f"Attention: head norms must be in {projected.dtype}, got {norms.query.dtype}.")
        if rotation is not None:
            self.check_rotation(rotation, len(projected))

    def check_rotation(self, rotation: Rotation, rows: int) -> None:
        """Raise ConfigurationError unless the angles fit `rows` rows of this batch and the head size."""
        if rows != len(self._slots) or 2 * rotation.pairs > self._cache.shape[4]:
            raise ConfigurationError(f"Attention: angles ({rows}, {rotation.pairs}) do not fit the batch or the heads.")
        for angles in (rotation.cosine, rotation.sine):
            if angles.dtype != torch.float32 or not angles.is_contiguous() or angles.shape != (rows, rotation.pairs):
                raise ConfigurationError("Attention: cosines and sines must be contiguous float32 of the same shape.")
