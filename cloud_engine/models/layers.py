"""Layers shared by all model families. Batches are ragged: tensors have one row per token and no batch dimension."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ...kernels.activation.ops import gated_activation
from ...kernels.activation.types import Activation
from ...kernels.attention.types import Attention, LayerAttention
from ...kernels.kv_cache.types import HeadNorms, Rotation
from ...kernels.norm.ops import add_rms_norm, rms_norm
from ...kernels.norm.types import Norm
from .config import ModelConfig
from .sharding import ModelGroup, Shard


class Linear(nn.Linear):
    """This rank's part of a linear layer, from `inputs` to `outputs` in the whole model.

    It has no initial weights: they are loaded later, and initialising would import torch's compiler.
    """

    def __init__(self, inputs: int, outputs: int, shard: Shard, *, bias: bool = False) -> None:
        sizes = (shard.length, outputs) if shard.dim else (inputs, shard.length)
        super().__init__(*sizes, bias=bias)
        self.shard = shard

    def reset_parameters(self) -> None:
        pass


class TokenEmbedding(nn.Embedding):
    """This rank's part of the token embeddings, without initial weights, like `Linear`."""

    def __init__(self, size: int, shard: Shard) -> None:
        super().__init__(shard.length, size)
        self.shard = shard

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019), computed in float32 as in Llama."""

    def __init__(self, size: int, eps: float, *, unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.unit_offset = unit_offset  # whether to multiply by 1 + weight, in float32 (Gemma)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden` (rows, size) normalised, as a new tensor."""
        return rms_norm(hidden, self._norm())

    def add(self, update: Tensor, residual: Tensor) -> Tensor:
        """Add `update` to `residual` in place, and return the normalised sum."""
        return add_rms_norm(update, residual, self._norm())

    def _norm(self) -> Norm:
        return Norm(self.weight, self.eps, self.unit_offset)


class NoNorm(nn.Module):
    """Stands for the norm before a layer, in models that have only norms after it."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden

    def add(self, update: Tensor, residual: Tensor) -> Tensor:
        """Add `update` to `residual` in place."""
        return residual.add_(update)


def norm(config: ModelConfig, size: int) -> RMSNorm:
    """Create the model's norm over a last dimension of `size` elements."""
    return RMSNorm(size, config.rms_norm_eps, unit_offset=config.unit_offset_norms)


class HeadSinks(nn.Module):
    """A logit per query head that joins the softmax without a value (Xiao et al. 2023, as learned in gpt-oss)."""

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shard.length))
        self.shard = shard


class GroupedQueryAttention(nn.Module):
    """Attention in which several query heads share a KV head. One matrix product computes query, key and value.

    A rank has a share of the heads. If there are fewer KV heads than ranks, several ranks have the same one.
    """

    def __init__(self, config: ModelConfig, index: int, group: ModelGroup) -> None:
        super().__init__()
        size, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
        self.head_dim, self._group = config.head_dim, group
        by_head = Shard(0, (heads, kv_heads, kv_heads), self.head_dim, group)
        self.qkv_proj = Linear(size, (heads + 2 * kv_heads) * self.head_dim, by_head, bias=config.qkv_bias)
        inputs = Shard(1, (heads,), self.head_dim, group)
        self.o_proj = Linear(heads * self.head_dim, size, inputs, bias=config.output_bias)
        self._whole = (heads * self.head_dim, kv_heads * self.head_dim) if config.whole_qk_norm else None
        normed = self._whole or (self.head_dim, self.head_dim)
        self.q_norm, self.k_norm = (norm(config, each) if config.qk_norm else None for each in normed)
        scale = self.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        own_index = index - group.layers(config.num_layers).start
        self.layer = LayerAttention(own_index, scale, config.window(index))
        self.sinks = HeadSinks(Shard(0, (heads,), group=group)) if config.has_sinks else None

    def forward(self, hidden: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        projected = self.qkv_proj(hidden)
        if self._whole is not None:
            projected = self._normed_as_a_whole(projected, self._whole)
        projected = projected.view(hidden.shape[0], -1, self.head_dim)
        layer = self.layer if self.sinks is None else replace(self.layer, sinks=self.sinks.weight.float())
        mixed = attention.attend(layer, projected, rotation, self._norms())
        return self._group.sum(self.o_proj(mixed.reshape(hidden.shape[0], -1)))

    def _norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None or self._whole is not None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.unit_offset)

    def _normed_as_a_whole(self, projected: Tensor, sizes: tuple[int, int]) -> Tensor:
        assert self.q_norm is not None, "the configuration has these norms"
        assert self.k_norm is not None, "the configuration has these norms"
        query, key, value = projected.split((*sizes, sizes[1]), dim=-1)
        return torch.cat((self.q_norm(query.contiguous()), self.k_norm(key.contiguous()), value), dim=-1)


class GatedMLP(nn.Module):
    """Gated feed-forward layer (Shazeer 2020). One matrix product computes the gate and up projections."""

    def __init__(self, config: ModelConfig, group: ModelGroup, neurons: int | None = None) -> None:
        """`neurons`: of the whole layer; None for the model's `intermediate_size`."""
        super().__init__()
        size, neurons = config.hidden_size, neurons or config.intermediate_size
        self._group = group
        self.gate_up_proj = Linear(size, 2 * neurons, Shard(0, (neurons, neurons), group=group), bias=config.mlp_bias)
        self.down_proj = Linear(neurons, size, Shard(1, (neurons,), group=group), bias=config.mlp_bias)
        self.activation: Activation = config.activation

    def forward(self, hidden: Tensor) -> Tensor:
        return self._group.sum(self.part(hidden))

    def part(self, hidden: Tensor) -> Tensor:
        """Return this rank's term of the output."""
        return self.down_proj(gated_activation(self.gate_up_proj(hidden), self.activation))
