"""Interface of attention over a paged KV cache, and the model and batch data that every implementation gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kv_cache.types import HeadNorms, Rotation


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Rows of one sequence in a ragged batch: positions `start` to `start + length - 1`."""

    start: int
    length: int
    block_table: Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    # Index of the layer in the cache.
    index: int
    # Factor by which query-key products are multiplied.
    scale: float
    # Number of tokens that a query sees, its own included; None for all.
    window: int | None = None
    # (heads,) float32: a logit per head that joins the softmax without a value (attention sink); None for none.
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """One layer's parameters for computing scores from query-key products."""

    scale: float
    # Number of tokens that a query sees, its own included; None for all.
    window: int | None = None
    # Scales of an FP8 cache: keys and values were divided by these before they were stored.
    key_scale: float = 1.0
    value_scale: float = 1.0
    # As in `LayerAttention`.
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class CacheScales:
    """Scales of an FP8 cache, by which keys and values are divided before they are stored."""

    key: float = 1.0
    value: float = 1.0


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Size, dtype and device of a paged KV cache."""

    layers: int
    blocks: int
    block_size: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    windowed: bool = False

    def empty(self, *block: int) -> Tensor:
        """Return zeros in the shape (layers, blocks, *block)."""
        return torch.zeros((self.layers, self.blocks, *block), dtype=self.dtype, device=self.device)


class Attention(Protocol):
    """A layer's access to its KV cache. One object serves one forward pass and knows the sequence of every row.

    Models never see blocks or batches.
    """

    def attend(
        self, layer: LayerAttention, projected: Tensor, rotation: Rotation | None, norms: HeadNorms | None = None
    ) -> Tensor:
        """Store this pass's keys and values, then attend causally over each row's whole sequence.

        `projected` (rows, heads + 2 * kv_heads, head_dim): queries, keys and values, which are normed and rotated here
        and may be overwritten. Returns (rows, heads, head_dim); rows of padding get zeros.
        """
        ...
