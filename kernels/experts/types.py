"""The experts of each row, and the pairs of rows and experts sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts chosen for each row."""

    # (rows, top_k) int64. From the layer's number of experts on: an expert of another rank.
    experts: Tensor
    # (rows, top_k) float32: factors of the experts' outputs; 0 for experts of other ranks.
    weights: Tensor
    # Whether other ranks have experts, too.
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Pairs of a row and one of its experts, sorted by expert."""

    # (pairs,) int64: row of each pair.
    rows: Tensor
    # (experts + 1,) int64: first pair of each expert. From the last number on, pairs belong to other ranks.
    starts: Tensor
    # (pairs,) int64: place of each pair in this order, row by row.
    places: Tensor
