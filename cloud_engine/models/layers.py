"""The small layers every architecture is built from, over ragged batches: one row per token, no batch dimension."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(Protocol):
    """How a layer reaches its KV cache. One object serves one forward pass and knows which rows belong together.

    The interface behind which CPU and GPU implementations live: the models never see blocks or batches.
    """

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store this pass's keys and values, then attend causally over each row's whole sequence.

        `query` (tokens, heads, head_dim); `key`, `value` (tokens, kv_heads, head_dim). Returns the query's shape.
        """
        ...


class RMSNorm(nn.Module):
    """Zhang & Sennrich 2019, computed in float32 as Llama does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        normed = functional.rms_norm(hidden.float(), (hidden.shape[-1],), eps=self.eps)
        return normed.to(hidden.dtype) * self.weight


class Rotary:
    """Cosines and sines of one forward pass; Hugging Face's convention (dimension i is paired with i + head_dim/2)."""

    def __init__(self, positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> None:
        even = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
        angles = positions.float()[:, None] * (1.0 / theta ** (even / head_dim))
        self.cos = torch.cat((angles, angles), dim=-1).cos().to(dtype)[:, None, :]
        self.sin = torch.cat((-angles, angles), dim=-1).sin().to(dtype)[:, None, :]

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotate `heads` (tokens, heads, head_dim) by each row's position."""
        return heads * self.cos + heads.roll(heads.shape[-1] // 2, dims=-1) * self.sin


class GroupedQueryAttention(nn.Module):
    """Attention projections with `kv_heads` shared among `heads`; query, key and value are one matrix product."""

    def __init__(self, layer: int, hidden_size: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.qkv_proj = nn.Linear(hidden_size, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=False)

    def forward(self, hidden: Tensor, rotary: Rotary, attention: Attention) -> Tensor:
        projected = self.qkv_proj(hidden).view(hidden.shape[0], -1, self.head_dim)
        query_key, value = projected.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        query, key = rotary(query_key).split((self.heads, self.kv_heads), dim=1)
        mixed = attention.attend(self.layer, query, key, value)
        return self.o_proj(mixed.reshape(hidden.shape[0], -1))


class SwiGLU(nn.Module):
    """Shazeer 2020; gate and up projection are one matrix product."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)
