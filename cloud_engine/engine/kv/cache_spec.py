"""The shape of a model's KV cache, and the size of a block in bytes."""

from __future__ import annotations

from ....kernels.attention.types import CacheSpec
from ...models.decoder import Decoder


def cache_spec(model: Decoder, num_blocks: int, block_size: int) -> CacheSpec:
    config, weight = model.config, model.embed_tokens.weight
    return CacheSpec(
        config.num_layers,
        num_blocks,
        block_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        weight.dtype,
        weight.device,
        config.windowed,
    )


def block_bytes(model: Decoder, block_size: int) -> int:
    """Return the bytes of one KV block over all layers."""
    config = model.config
    elements = config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim
    return elements * model.embed_tokens.weight.element_size()
