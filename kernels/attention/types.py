"""The interface of attention over a paged KV cache, and what every implementation is told of model and batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..kv_cache.types import HeadNorms, Rotation


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """The rows of one sequence in a ragged batch: positions `start` to `start + length - 1`."""

    start: int
    length: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer."""

    # Its place in the cache.
    index: int
    # The factor of its scores.
    scale: float
    # Tokens that a query sees, its own included; None is all of them.
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """One layer's way from products of queries and keys to scores."""

    scale: float
    # Tokens that a query sees, its own included; None is all of them.
    window: int | None = None
    # The cache holds the keys and values divided by these.
    key_scale: float = 1.0
    value_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class CacheScales:
    """The factors of the numbers in an FP8 cache."""

    key: float = 1.0
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A paged KV cache to be made."""

    layers: int
    blocks: int
    block_size: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    # Whether any layer has a sliding window.
    windowed: bool = False

    def empty(self, *block: int) -> Tensor:
        """Zeros in the shape (layers, blocks, *block)."""
        return torch.zeros((self.layers, self.blocks, *block), dtype=self.dtype, device=self.device)


class Attention(Protocol):
    """A layer's access to its KV cache. One object serves one forward pass and knows which rows belong together.

    Models never see blocks or batches.
    """

    def attend(
        self, layer: LayerAttention, projected: Tensor, rotation: Rotation | None, norms: HeadNorms | None = None
    ) -> Tensor:
        """Store this pass's keys and values, then attend causally over each row's whole sequence.

        `projected` (rows, heads + 2 * kv_heads, head_dim): queries, keys and values. They are normed and rotated here
        and may be overwritten. Returns (rows, heads, head_dim); rows of padding get zeros.
        """
        ...
