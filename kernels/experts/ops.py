"""Feed-forward layers of experts (Shazeer et al. 2017): each row is computed by the experts chosen for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..activation.ops import gated_activation
from ..activation.types import Activation
from ..linear.cpu import NativeLinear
from ..runtime.backend import uses_triton
from .cpu import NativeExperts
from .reference import combined, each_expert, expert_linear_reference, group_rows
from .types import ExpertGroups, Routing


class ExpertLinear(nn.Module):
    """The linear layers of all experts in one tensor, `weight` (experts, features, inputs), without initial values."""

    bias: Tensor | None

    def __init__(self, shape: tuple[int, int, int], *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.register_parameter("bias", nn.Parameter(torch.empty(shape[:2])) if bias else None)

    @property
    def num_experts(self) -> int:
        return len(self.weight)

    def forward(self, hidden: Tensor, groups: ExpertGroups, rows: Tensor | None = None) -> Tensor:
        """Map row rows[pair] of `hidden`, or row `pair` without `rows`, with the pair's expert: (pairs, features)."""
        if uses_triton(hidden):
            from .triton import expert_linear_triton

            return expert_linear_triton(hidden, self.weight, self.bias, groups, rows)
        hidden = hidden if rows is None else hidden.index_select(0, rows)
        return expert_linear_reference(hidden, self.weight, self.bias, groups)


class SeparateExperts(nn.Module):
    """A linear layer per expert. On a CPU, one C call computes all that are packed for C."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._native: NativeExperts | None = None

    @property
    def num_experts(self) -> int:
        return len(self.layers)

    def forward(self, hidden: Tensor, groups: ExpertGroups, rows: Tensor | None = None) -> Tensor:
        """Compute the same as `ExpertLinear`."""
        layers = list(self.layers)
        if self._native is None and all(isinstance(layer, NativeLinear) for layer in layers):
            self._native = NativeExperts(cast("list[NativeLinear]", layers))
        if self._native is not None:
            return self._native(hidden, groups, rows)
        hidden = hidden if rows is None else hidden.index_select(0, rows)
        features = cast("tuple[int, int]", getattr(layers[0], "shape", None) or layers[0].weight.shape)[0]
        return each_expert(hidden, groups, features, lambda expert, part: layers[expert](part))


class _Expert(nn.Linear):
    """The layer of one expert, without initial weights, whose initialisation would import torch's compiler."""

    def reset_parameters(self) -> None:
        pass


def separate_experts(model: nn.Module) -> None:
    """Replace every `ExpertLinear` of a CPU model in place by separate layers over the same memory, to be packed."""
    places = [(parent, *child) for parent in model.modules() for child in parent.named_children()]
    for parent, name, child in places:
        if isinstance(child, ExpertLinear) and child.weight.device.type == "cpu":
            setattr(parent, name, SeparateExperts([_layer(child, expert) for expert in range(child.num_experts)]))


def _layer(stacked: ExpertLinear, expert: int) -> nn.Linear:
    features, inputs = stacked.weight.shape[1:]
    layer = _Expert(inputs, features, bias=stacked.bias is not None, device="meta")
    layer.weight = nn.Parameter(stacked.weight.detach()[expert], requires_grad=False)
    if stacked.bias is not None:
        layer.bias = nn.Parameter(stacked.bias.detach()[expert], requires_grad=False)
    return layer


def routed_experts(
    hidden: Tensor,
    routing: Routing,
    gate_up: ExpertLinear | SeparateExperts,
    down: ExpertLinear | SeparateExperts,
    activation: Activation,
) -> Tensor:
    """Return the weighted sum of each row's experts, (rows, size), for `hidden` (rows, size). No row is dropped."""
    groups = group_rows(routing, gate_up.num_experts)
    gated = gated_activation(gate_up(hidden, groups, groups.rows), activation)
    return combined(down(gated, groups), groups, routing)
