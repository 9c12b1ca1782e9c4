"""Attention of one forward pass in Triton; implements `types.Attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..kv_cache.types import HeadNorms, HeadTransform, Rotation
from .launch import AttentionShape
from .metadata import AttentionMetadata
from .types import CacheScales, LayerAttention, ScoreOptions


class TritonAttention:
    """Attention over `cache` (layers, blocks, block_size, 2 * kv_heads, head_dim), keys before values, for one pass.

    Reads nothing back from the device and does not depend on `metadata` values, so a CUDA graph can capture a pass.
    """

    def __init__(
        self, cache: Tensor, metadata: AttentionMetadata, shape: AttentionShape, *, scales: CacheScales | None = None
    ) -> None:
        expected = (shape.block_size, 2 * shape.kv_heads, shape.head_dim)
        if cache.shape[2:] != expected or cache.element_size() != shape.cache_bytes or not cache.is_contiguous():
            raise ConfigurationError(
                f"The KV cache {tuple(cache.shape)} of {cache.dtype} must be contiguous, with blocks of {expected} and "
                f"elements of {shape.cache_bytes} bytes."
            )
        if cache.dtype != torch.float8_e4m3fn and scales is not None:
            raise ConfigurationError(f"Scales of keys and values need a cache in float8_e4m3fn, not {cache.dtype}.")
        self._cache = cache
        self._metadata = metadata
        self._shape = shape
        self._scales = scales or CacheScales()

    def attend(
        self, layer: LayerAttention, projected: Tensor, rotation: Rotation | None, norms: HeadNorms | None = None
    ) -> Tensor:
        """Implement `Attention.attend`."""
        from ..kv_cache.triton import launch_write_kv_
        from .triton import attend

        transform = HeadTransform(norms, self._scales.key, self._scales.value)
        launch_write_kv_(projected, self._cache[layer.index], self._metadata.slots, transform, rotation)
        query = projected[:, : self._shape.heads]
        self._check(query)
        options = ScoreOptions(layer.scale, layer.window, self._scales.key, self._scales.value, layer.sinks)
        return attend(query, self._cache[layer.index], self._metadata, self._shape, options)

    def _check(self, query: Tensor) -> None:
        """Check shapes and dtypes, because a kernel would read past the end of tensors that do not fit."""
        shape, dtype = self._shape, self._cache.dtype
        expected = (len(self._metadata.slots), shape.heads, shape.head_dim)
        if query.shape != expected or query.stride()[1:] != (shape.head_dim, 1):
            raise ConfigurationError(
                f"Attention: queries must be {expected} with contiguous heads, got {tuple(query.shape)} with strides "
                f"{query.stride()}."
            )
        if dtype not in (query.dtype, torch.float8_e4m3fn):
            raise ConfigurationError(f"Attention: queries in {query.dtype} do not fit a cache of {dtype}.")
