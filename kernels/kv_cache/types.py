"""Rotation, norms and scales of heads before they enter the cache, and a check of the tensors' shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embeddings (Su et al. 2021): cosines and sines (rows, pairs) of each row's angles.

    Dimension i is paired with i + pairs, in Hugging Face's order. Dimensions from 2 * pairs on are not rotated.
    """

    cosine: Tensor
    sine: Tensor

    @property
    def pairs(self) -> int:
        return self.cosine.shape[-1]


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm over each head of queries and keys (QK-norm)."""

    # Weights of queries and of keys, (head_dim,) each.
    query: Tensor
    key: Tensor
    eps: float
    # Whether weights are stored minus one (Gemma).
    unit_offset: bool = False


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """Transform of a layer's heads before they are stored."""

    norms: HeadNorms | None = None
    # Scales of an FP8 cache, by which keys and values are divided before they are stored.
    key_scale: float = 1.0
    value_scale: float = 1.0


def check_kv_write(projected: Tensor, cache: Tensor, slots: Tensor, rotation: Rotation | None) -> None:
    """Raise ConfigurationError if the tensors do not fit together. Never waits for a GPU, as no values are read."""
    rows, heads, head_dim = projected.shape
    problem = None
    if cache.shape[3] != head_dim or cache.shape[2] > heads:
        problem = f"a cache for heads {tuple(cache.shape[2:])} does not fit {heads} projected heads of {head_dim}"
    elif cache.dtype not in (projected.dtype, torch.float8_e4m3fn):
        problem = f"{projected.dtype} heads cannot be written to a cache of {cache.dtype}"
    elif slots.shape != (rows,):
        problem = f"{rows} rows need one slot each, got slots of shape {tuple(slots.shape)}"
    elif projected.stride()[1:] != (head_dim, 1):
        problem = "the heads of each projected row must be contiguous"
    elif rotation is not None and (rotation.cosine.shape != rotation.sine.shape or len(rotation.cosine) != rows):
        problem = f"{rows} rows do not fit angles of {tuple(rotation.cosine.shape)} and {tuple(rotation.sine.shape)}"
    elif rotation is not None and 2 * rotation.pairs > head_dim:
        problem = f"{rotation.pairs} rotary pairs do not fit in heads of {head_dim} values"
    if problem is not None:
        raise ConfigurationError(f"KV write: {problem}.")
