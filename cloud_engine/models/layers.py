"""Layers shared by all model families. Batches are ragged: tensors have one row per token and no batch dimension."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...kernels.activation.ops import gated_activation
from ...kernels.activation.types import Activation
from ...kernels.attention.types import Attention, LayerAttention
from ...kernels.kv_cache.types import HeadNorms, Rotation
from ...kernels.norm.ops import add_rms_norm, rms_norm
from ...kernels.norm.types import Norm
from .config import ModelConfig


class Linear(nn.Linear):
    """A linear layer without initial weights: they are loaded later, and initialising would import torch's compiler."""

    def reset_parameters(self) -> None:
        pass


class TokenEmbedding(nn.Embedding):
    """A token embedding without initial weights, like `Linear`."""

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


def norm(config: ModelConfig, size: int) -> RMSNorm:
    """Create the model's norm over a last dimension of `size` elements."""
    return RMSNorm(size, config.rms_norm_eps, unit_offset=config.unit_offset_norms)


class GroupedQueryAttention(nn.Module):
    """Attention in which several query heads share a KV head. One matrix product computes query, key and value."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv_proj = Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = norm(config, self.head_dim) if config.qk_norm else None
        self.k_norm = norm(config, self.head_dim) if config.qk_norm else None
        scale = self.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.layer = LayerAttention(index, scale, config.window(index))

    def forward(self, hidden: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        projected = self.qkv_proj(hidden).view(hidden.shape[0], -1, self.head_dim)
        mixed = attention.attend(self.layer, projected, rotation, self._norms())
        return self.o_proj(mixed.reshape(hidden.shape[0], -1))

    def _norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.unit_offset)


class GatedMLP(nn.Module):
    """Gated feed-forward layer (Shazeer 2020). One matrix product computes the gate and up projections."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation: Activation = config.activation

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(gated_activation(self.gate_up_proj(hidden), self.activation))
