"""The decoder that all families share: pre-norm layers with rotary positions over ragged batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...kernels.attention.types import Attention
from ...kernels.kv_cache.types import Rotation
from .config import ModelConfig
from .layers import GatedMLP, GroupedQueryAttention, Linear, TokenEmbedding, norm, soft_capped
from .rope import Rotary


class DecoderLayer(nn.Module):
    """Attention, then feed-forward, each added to the residual stream; Gemma also norms what it adds."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_norm = norm(config, size)
        self.attention = GroupedQueryAttention(config, index)
        self.attention_out_norm = norm(config, size) if config.sandwich_norms else nn.Identity()
        self.mlp_norm = norm(config, size)
        self.mlp = GatedMLP(config)
        self.mlp_out_norm = norm(config, size) if config.sandwich_norms else nn.Identity()

    def forward(self, update: Tensor | None, residual: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        """Add `update`, what the layer before has computed, to `residual` in place; return this layer's own."""
        normed = self.input_norm(residual) if update is None else self.input_norm.add(update, residual)
        attended = self.attention_out_norm(self.attention(normed, rotation, attention))
        return self.mlp_out_norm(self.mlp(self.mlp_norm.add(attended, residual)))


class Decoder(nn.Module):
    """A decoder-only language model. Which rows form which sequence is known to `attention` alone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_layers))
        self.norm = norm(config, config.hidden_size)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rotary = Rotary(config.rotary)
        self._sliding_rotary = None if config.sliding_rotary is None else Rotary(config.sliding_rotary)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Last hidden states after the final norm: (tokens, hidden_size). `token_ids`, `positions`: (tokens,) int64."""
        hidden, rotations = self.embed(token_ids), self.rotations(positions)
        update: Tensor | None = None
        for index, layer in enumerate(self.layers):
            update = layer(update, hidden, rotations[self.config.is_sliding(index)], attention)
        return self.norm(hidden) if update is None else self.norm.add(update, hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        """(tokens, hidden_size): what the first layer reads."""
        hidden = self.embed_tokens(token_ids)
        return hidden if self.config.embedding_scale == 1 else hidden * self.embedding_scale

    def rotations(self, positions: Tensor) -> tuple[Rotation, Rotation]:
        """Of layers that see everything, and of those with a sliding window."""
        plain = self._rotary(positions)
        return plain, plain if self._sliding_rotary is None else self._sliding_rotary(positions)

    @property
    def embedding_scale(self) -> float:
        """Rounded to the dtype of the weights, as Gemma multiplies."""
        return float(torch.tensor(self.config.embedding_scale, dtype=self.embed_tokens.weight.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size) to (rows, vocab_size) float32."""
        logits = self.lm_head(hidden).to(torch.float32)
        return logits if self.config.logit_soft_cap is None else soft_capped(logits, self.config.logit_soft_cap)
