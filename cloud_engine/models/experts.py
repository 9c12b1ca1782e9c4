"""Feed-forward layers with routed experts: a router chooses a few experts for each row, and no row is dropped."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...kernels.activation.types import Activation
from ...kernels.experts.ops import ExpertLinear, routed_experts
from ...kernels.experts.types import Routing
from .config import ExpertsConfig, ModelConfig
from .layers import GatedMLP, Linear
from .sharding import ALONE, ExpertShard, ModelGroup, Shard


class RoutedExperts(nn.Module):
    """Experts, and optionally a shared network for all rows. Ranks share each expert, or have whole experts.

    All ranks compute the routes, and sum their outputs once.
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, group: ModelGroup) -> None:
        super().__init__()
        size, neurons, count = config.hidden_size, experts.intermediate_size, experts.count
        self._config, self._group = experts, group
        self._own = group.share(count) if group.expert_parallel else range(count)
        each = ALONE if group.expert_parallel else group
        self.router = Linear(size, count, Shard(0, (count,)), bias=experts.bias)
        bias = nn.Parameter(torch.empty(count)) if experts.has_correction else None
        self.register_parameter("e_score_correction_bias", bias)
        outputs, inputs = Shard(0, (neurons, neurons), group=each), Shard(1, (neurons,), group=each)
        self.expert_gate_up = StackedLinear(outputs.length, size, ExpertShard(self._own, outputs), bias=experts.bias)
        self.expert_down = StackedLinear(size, inputs.length, ExpertShard(self._own, inputs), bias=experts.bias)
        self.shared = GatedMLP(config, group, experts.shared_size) if experts.shared_size else None
        self.shared_gate = Linear(size, 1, Shard(0, (1,))) if experts.gates_shared else None
        self.activation: Activation = config.activation

    def forward(self, hidden: Tensor) -> Tensor:
        routing = self._part(route(self.router(hidden), self._config, self.e_score_correction_bias))
        output = routed_experts(hidden, routing, self.expert_gate_up, self.expert_down, self.activation)
        if self.shared is not None:
            shared = self.shared.part(hidden)
            output += shared if self.shared_gate is None else shared * self.shared_gate(hidden).sigmoid()
        return self._group.sum(output)

    def _part(self, routing: Routing) -> Routing:
        """Return the routes to this rank's experts, which are counted from 0."""
        if len(self._own) == self._config.count:
            return routing
        experts = routing.experts - self._own.start
        is_own = (experts >= 0) & (experts < len(self._own))
        return Routing(torch.where(is_own, experts, len(self._own)), routing.weights * is_own, is_partial=True)


class StackedLinear(ExpertLinear):
    """This rank's part of the linear layers of all experts."""

    def __init__(self, outputs: int, inputs: int, shard: ExpertShard, *, bias: bool) -> None:
        super().__init__((len(shard.experts), outputs, inputs), bias=bias)
        self.shard = shard


def route(logits: Tensor, config: ExpertsConfig, correction: Tensor | None = None) -> Routing:
    """Choose experts for each row of `logits` (rows, experts). `correction` (experts,) affects only the choice.

    With groups, experts are in the groups with the largest sums of their best scores (DeepSeek-V3, 2024).
    """
    logits = logits.float()
    scores = logits.sigmoid() if config.scores == "sigmoid" else logits.softmax(-1)
    choice = scores if correction is None else scores + correction
    if config.groups > 1:
        groups = choice.unflatten(1, (config.groups, -1))
        best = groups.topk(config.group_scores).values.sum(-1).topk(config.top_groups).indices
        is_best = torch.zeros(groups.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, True)
        choice = groups.masked_fill(~is_best[..., None], -torch.inf).flatten(1)
    experts = choice.topk(config.top_k).indices
    weights = scores.gather(1, experts)
    if config.renormalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(experts, weights * config.scaling)
