"""Experts in plain torch: the reference for the kernels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from .types import ExpertGroups, Routing


def group_rows(routing: Routing, num_experts: int) -> ExpertGroups:
    """Sort the pairs of rows and experts by expert. Reads nothing back from the device."""
    experts, order = torch.sort(routing.experts.flatten(), stable=True)
    numbers = torch.arange(max(len(order), num_experts + 1), device=order.device)
    places = torch.empty_like(order).scatter_(0, order, numbers[: len(order)])
    starts = torch.searchsorted(experts, numbers[: num_experts + 1])
    return ExpertGroups(order // routing.experts.shape[1], starts, places)


def expert_linear_reference(hidden: Tensor, weight: Tensor, bias: Tensor | None, groups: ExpertGroups) -> Tensor:
    """Multiply sorted rows (pairs, inputs) with `weight` (experts, features, inputs) of their expert.

    `bias` is (experts, features). Returns (pairs, features) in the dtype of `hidden`.
    """

    def multiply(expert: int, rows: Tensor) -> Tensor:
        return functional.linear(rows, weight[expert], None if bias is None else bias[expert])

    return each_expert(hidden, groups, weight.shape[1], multiply)


def each_expert(
    hidden: Tensor, groups: ExpertGroups, features: int, multiply: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Apply `multiply` to each expert's rows of `hidden`, which are sorted; experts without rows are not read."""
    out = hidden.new_zeros(len(hidden), features)
    starts: list[int] = groups.starts.tolist()
    for expert, (start, end) in enumerate(pairwise(starts)):
        if start < end:
            out[start:end] = multiply(expert, hidden[start:end])
    return out


def combined(outputs: Tensor, groups: ExpertGroups, routing: Routing) -> Tensor:
    """Sum the experts' `outputs` (pairs, size) of each row, times their factors: (rows, size), summed in float32."""
    weights = routing.weights[..., None]
    of_rows = outputs.index_select(0, groups.places).view(*routing.experts.shape, outputs.shape[1]).float()
    if routing.is_partial:  # outputs of other ranks' pairs were not computed, and may be NaN
        of_rows = of_rows.masked_fill(weights == 0, 0)
    return (of_rows * weights).sum(1).to(outputs.dtype)
