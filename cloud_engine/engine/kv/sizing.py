"""The size of a KV cache: context length and number of blocks, as configured or else as large as memory allows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....kernels.attention.types import CacheSpec
from ....kernels.runtime.backend import KVCacheDtype
from ....protocol.errors import ConfigurationError
from ...models.causal_model import CausalModel
from ..config import EngineConfig
from .kv_cache_manager import Window, most_blocks

_DEFAULT_BYTES = 2**30
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """The size of a KV cache."""

    # Maximum tokens of prompt and answer together.
    context_length: int
    # Number of KV blocks, enough for at least one full context.
    num_blocks: int
    # Widest window of the models that share the block tables; None if any of them attends to the whole sequence.
    window: Window | None

    @classmethod
    def of(cls, models: Sequence[CausalModel], config: EngineConfig, available: int | None = None) -> KVCacheSize:
        """Compute the sizes for `models`: the target and, if there is one, its draft model.

        `available`: bytes for the KV cache; None for 1 GiB.

        Plans enough blocks for a full batch at full context, if memory allows. If memory cannot hold even one context,
        the context is shortened to fit. Raises ConfigurationError if the configured context exceeds the model's or the
        KV cache, or if memory does not hold a single block.
        """
        trained = models[0].config.context_length
        length = config.max_model_len or trained
        if length > trained:
            fault = f"max_model_len is {length} tokens, but the model supports {trained}: lower it."
            raise ConfigurationError(fault, param="max_model_len")
        window = _window(models, config)
        needed = most_blocks(length, config.block_size, window)
        num_blocks = config.num_gpu_blocks_override
        num_blocks = num_blocks or min(needed * config.max_num_seqs, _fitting_blocks(models, config, available))
        if needed <= num_blocks:
            return cls(length, num_blocks, window)
        held, gib = num_blocks * config.block_size, needed * _bytes_of_block(models, config) / 2**30
        if config.max_model_len is not None:
            raise ConfigurationError(
                f"A context of {length} tokens needs {needed} blocks of KV cache ({gib:.1f} GiB), but the cache has "
                f"{num_blocks}: lower max_model_len to {held}, or set num_gpu_blocks_override to {needed}.",
                param="max_model_len",
            )
        why = f"the KV cache has {num_blocks} blocks; the whole context needs {needed} ({gib:.1f} GiB)"
        _LOG.info("context: %d of the model's %d tokens (%s)", held, trained, why)
        return cls(held, num_blocks, window)


def _window(models: Sequence[CausalModel], config: EngineConfig) -> Window | None:
    reaches = [model.config.reach for model in models]
    finite = [reach for reach in reaches if reach is not None]
    return Window(max(finite), config.max_num_batched_tokens) if len(finite) == len(reaches) else None


def _bytes_of_block(models: Sequence[CausalModel], config: EngineConfig) -> int:
    return sum(block_bytes(model, config.block_size, config.kv_cache_dtype) for model in models)


def _fitting_blocks(models: Sequence[CausalModel], config: EngineConfig, available: int | None) -> int:
    available = _DEFAULT_BYTES if available is None else available
    blocks = available // _bytes_of_block(models, config)
    if blocks < 1:
        raise ConfigurationError(
            f"There is too little memory for a KV cache: a block of {config.block_size} tokens needs "
            f"{_bytes_of_block(models, config)} bytes, but {available} are free. Lower block_size, or free memory.",
            param="block_size",
        )
    return blocks


def cache_spec(model: CausalModel, num_blocks: int, block_size: int, dtype: KVCacheDtype = "auto") -> CacheSpec:
    config = model.config
    return CacheSpec(
        model.num_own_layers,
        num_blocks,
        block_size,
        model.num_heads,
        model.num_kv_heads,
        config.head_dim,
        _cache_dtype(model, dtype),
        model.device,
        config.windowed,
    )


def block_bytes(model: CausalModel, block_size: int, dtype: KVCacheDtype = "auto") -> int:
    """Return the bytes of one KV block over all layers."""
    config = model.config
    most_layers = -(-config.num_layers // model.group.num_stages)
    elements = most_layers * 2 * block_size * model.num_kv_heads * config.head_dim
    return elements * _cache_dtype(model, dtype).itemsize


def _cache_dtype(model: CausalModel, dtype: KVCacheDtype) -> torch.dtype:
    return torch.float8_e4m3fn if dtype == "fp8" else model.dtype
