"""Llama architecture for training, in a few lines of torch with Hugging Face's parameter names.

Training computes whole rows without a KV cache, so the compiler can fuse the model into a few loops. Serving uses the
paged implementation in `cloud_engine.models`; a test checks that both implementations agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model; `hidden` must be a multiple of 2 * `heads`, and `heads` a multiple of `kv_heads`."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, 1e-5)


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.size, self.heads, self.kv_heads = shape.hidden // shape.heads, shape.heads, shape.kv_heads
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = _rotate(self.q_proj(x).view(batch, length, self.heads, self.size).transpose(1, 2), rotation)
        k = _rotate(self.k_proj(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2), rotation)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        # Compiled for a CPU, on short rows, these lines are two to three times as fast as torch's fused attention.
        scores = (q @ k.transpose(-1, -2)).float() * self.size**-0.5
        mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype) @ v
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class _FeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = _Norm(shape.hidden)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _Norm(shape.hidden)
        self.mlp = _FeedForward(shape)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Trunk(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = _Norm(shape.hidden)


class PocketLlama(nn.Module):
    """Llama with tied embeddings, rotary base 10,000, RMSNorm 1e-5, and initial weights of standard deviation 0.02."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.model = _Trunk(shape)
        self._head_size = shape.hidden // shape.heads
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return logits (batch, length, vocab) of token ids (batch, length).

        A token sees itself and the earlier tokens of its row. With `segments`, int (batch, length), it sees only tokens
        of its own segment, so that texts packed into one row do not see each other.
        """
        x = self.model.embed_tokens(tokens)
        length = tokens.shape[1]
        rotation = _rotation(length, self._head_size, tokens.device)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if segments is not None:
            mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])
        for layer in self.model.layers:
            x = layer(x, rotation, mask)
        return functional.linear(self.model.norm(x), self.model.embed_tokens.weight)


def _rotation(length: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embedding to (batch, heads, length, size): rotate each pair of entries i and i + size / 2."""
    cos, sin = rotation
    first, second = x.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (x.float() * cos + turned * sin).to(x.dtype)
