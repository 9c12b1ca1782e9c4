"""The small layers every family is built from, over ragged batches: one row per token, no batch dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.paged_attention import LayerAttention
from .config import ModelConfig
from .rope import Rotary


class Attention(Protocol):
    """How a layer reaches its KV cache. One object serves one forward pass and knows which rows belong together.

    The interface behind which CPU and GPU implementations live: the models never see blocks or batches.
    """

    def attend(self, layer: LayerAttention, query: Tensor, key_value: Tensor) -> Tensor:
        """Store this pass's keys and values, then attend causally over each row's whole sequence.

        `query` (tokens, heads, head_dim); `key_value` (tokens, 2 * kv_heads, head_dim), the keys first. Returns the
        query's shape.
        """
        ...


class RMSNorm(nn.Module):
    """Zhang & Sennrich 2019, computed in float32 as Llama does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return self.normed(hidden).to(hidden.dtype).mul_(self.weight)

    def normed(self, hidden: Tensor) -> Tensor:
        """`hidden` (..., size) over its root mean square, a new tensor in float32.

        Fewer operations and temporaries than torch's own on a CPU.
        """
        wide = hidden.to(torch.float32, copy=True)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide.mul_((length * length).mul_(1 / hidden.shape[-1]).add_(self.eps).rsqrt_())


class UnitOffsetRMSNorm(RMSNorm):
    """Gemma's: weights are stored less one, and the product is taken in float32."""

    def forward(self, hidden: Tensor) -> Tensor:
        return (self.normed(hidden) * (1.0 + self.weight.float())).to(hidden.dtype)


def norm(config: ModelConfig, size: int) -> RMSNorm:
    """The norm of a model's family over the last dimension, which has `size` elements."""
    return (UnitOffsetRMSNorm if config.unit_offset_norms else RMSNorm)(size, config.rms_norm_eps)


class GroupedQueryAttention(nn.Module):
    """Attention projections with `kv_heads` shared among `heads`; query, key and value are one matrix product."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=config.output_bias)
        self.q_norm = norm(config, self.head_dim) if config.qk_norm else None
        self.k_norm = norm(config, self.head_dim) if config.qk_norm else None
        scale = self.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.layer = LayerAttention(index, scale, config.window(index))

    def forward(self, hidden: Tensor, rotary: Rotary, attention: Attention) -> Tensor:
        projected = self.qkv_proj(hidden).view(hidden.shape[0], -1, self.head_dim)
        query, key_value = projected.split((self.heads, 2 * self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query.copy_(self.q_norm(query))
            key = key_value[:, : self.kv_heads]
            key.copy_(self.k_norm(key))
        rotary.rotate_(projected[:, : self.heads + self.kv_heads])
        mixed = attention.attend(self.layer, query, key_value)
        return self.o_proj(mixed.reshape(hidden.shape[0], -1))


class GatedMLP(nn.Module):
    """Shazeer 2020; gate and up projection are one matrix product."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation = _ACTIVATIONS[config.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        return self.down_proj(self.activation(gate).mul_(up))


def soft_capped(values: Tensor, cap: float) -> Tensor:
    """`cap * tanh(values / cap)`: nothing exceeds `cap`, small values hardly change (Gemma 2)."""
    return torch.tanh(values / cap) * cap


def _gelu_tanh(gate: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh")


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": functional.silu, "gelu_tanh": _gelu_tanh}
