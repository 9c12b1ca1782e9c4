"""Llama: pre-norm decoder with rotary positions, grouped-query attention and SwiGLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .layers import Attention, GroupedQueryAttention, RMSNorm, Rotary, SwiGLU


class LlamaLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GroupedQueryAttention(
            index, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, hidden: Tensor, rotary: Rotary, attention: Attention) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, attention)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Llama(nn.Module):
    """Decoder over ragged batches. Which rows form which sequence is known to `attention` alone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Last hidden states after the final norm: (tokens, hidden_size). `token_ids`, `positions`: (tokens,) int64."""
        hidden = self.embed_tokens(token_ids)
        rotary = Rotary(positions, self.config.head_dim, self.config.rope_theta, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotary, attention)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size) to (rows, vocab_size) float32."""
        return self.lm_head(hidden).to(torch.float32)

    @staticmethod
    def checkpoint_names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
        """Our parameter name -> the checkpoint tensors it is made of, joined along the output dimension."""
        names: dict[str, tuple[str, ...]] = {
            "embed_tokens.weight": ("model.embed_tokens.weight",),
            "norm.weight": ("model.norm.weight",),
        }
        if not config.tie_word_embeddings:
            names["lm_head.weight"] = ("lm_head.weight",)
        parts: dict[str, tuple[str, ...]] = {
            "input_layernorm": ("input_layernorm",),
            "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "self_attn.o_proj": ("self_attn.o_proj",),
            "post_attention_layernorm": ("post_attention_layernorm",),
            "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.down_proj": ("mlp.down_proj",),
        }
        for layer in range(config.num_layers):
            for ours, theirs in parts.items():
                names[f"layers.{layer}.{ours}.weight"] = tuple(f"model.layers.{layer}.{name}.weight" for name in theirs)
        return names
