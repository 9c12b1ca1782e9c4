"""Attention of one forward pass in Triton, behind the interface that models use (`types.Attention`)."""

from __future__ import annotations

from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..kv_cache.types import HeadNorms, Rotation
from .launch import AttentionShape
from .metadata import AttentionMetadata
from .types import LayerAttention


class TritonAttention:
    """One forward pass over `cache` (layers, blocks, block_size, 2 * kv_heads, head_dim), keys then values.

    It reads nothing from the device and depends on no values in `metadata`, so that a CUDA graph can capture a pass.
    """

    def __init__(self, cache: Tensor, metadata: AttentionMetadata, shape: AttentionShape) -> None:
        expected = (shape.block_size, 2 * shape.kv_heads, shape.head_dim)
        if cache.shape[2:] != expected or cache.element_size() != shape.cache_bytes or not cache.is_contiguous():
            raise ConfigurationError(
                f"The KV cache {tuple(cache.shape)} of {cache.dtype} must be contiguous, its blocks {expected}, its "
                f"elements {shape.cache_bytes} bytes."
            )
        self._cache = cache
        self._metadata = metadata
        self._shape = shape

    def attend(
        self, layer: LayerAttention, projected: Tensor, rotation: Rotation | None, norms: HeadNorms | None = None
    ) -> Tensor:
        """Norm, rotate and store what `projected` (rows, heads + 2 * kv_heads, head_dim) has, then attend causally.

        Returns (rows, heads, head_dim). Rows of padding are stored nowhere and get zeros.
        """
        from ..kv_cache.triton import launch_write_kv_
        from .triton import attend

        heads, kv_heads, cache = self._shape.heads, self._shape.kv_heads, self._cache[layer.index]
        if projected.shape[1] != heads + 2 * kv_heads:
            raise ConfigurationError(f"Attention: {heads} and twice {kv_heads} heads, got {projected.shape[1]}.")
        launch_write_kv_(projected, cache, self._metadata.slots, norms, rotation)  # which checks all else
        return attend(projected[:, :heads], cache, self._metadata, self._shape, layer)
