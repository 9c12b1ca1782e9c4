"""What every implementation of attention over a paged KV cache is asked, and what it is told of the batch.

There are three: plain torch (`paged_attention`, the reference), C for CPUs (`native_attention`) and Triton
(`triton_attention`). Each lays its cache out as suits it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..kv_cache.ops import HeadNorms, Rotation


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """The rows of one sequence in a ragged batch: positions `start` to `start + length - 1`."""

    start: int
    length: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer asks of attention: its place in the cache, the factor of its scores, and how far back it sees.

    `window` counts tokens, the query's own included; None is all of them.
    """

    index: int
    scale: float
    window: int | None = None


class Attention(Protocol):
    """How a layer reaches its KV cache. One object serves one forward pass and knows which rows belong together.

    The models never see blocks or batches.
    """

    def attend(
        self, layer: LayerAttention, projected: Tensor, rotation: Rotation | None, norms: HeadNorms | None = None
    ) -> Tensor:
        """Store this pass's keys and values, then attend causally over each row's whole sequence.

        `projected` (rows, heads + 2 * kv_heads, head_dim): queries, keys and values, which are normed and rotated here
        and may be overwritten. Returns (rows, heads, head_dim); rows of padding get zeros.
        """
        ...
