"""The decoder of all families: pre-norm layers with rotary positions, over ragged batches."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...kernels.attention.types import Attention
from ...kernels.kv_cache.types import Rotation
from ...protocol.errors import ConfigurationError
from .causal_model import CausalModel
from .config import ModelConfig
from .experts import RoutedExperts
from .latent_attention import LatentAttention
from .layers import GatedMLP, GroupedQueryAttention, Linear, NoNorm, RMSNorm, TokenEmbedding, norm
from .rope import Rotary
from .sharding import ALONE, ModelGroup, Shard, check_divisible


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each added to the residual stream. Norms come before, after, or both (Gemma)."""

    def __init__(self, config: ModelConfig, index: int, group: ModelGroup) -> None:
        super().__init__()
        size = config.hidden_size
        before = partial(norm, config, size) if config.pre_norms else NoNorm
        self.input_norm = before()
        if config.latent is None:
            self.attention = GroupedQueryAttention(config, index, group)
        else:
            self.attention = LatentAttention(config, config.latent, index, group)
        self.attention_out_norm = norm(config, size) if config.post_norms else nn.Identity()
        self.mlp_norm = before()
        experts = config.experts_of(index)
        self.mlp = GatedMLP(config, group) if experts is None else RoutedExperts(config, experts, group)
        self.mlp_out_norm = norm(config, size) if config.post_norms else nn.Identity()

    def forward(self, update: Tensor | None, residual: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        """Add the previous layer's `update` to `residual` in place. Return this layer's update."""
        normed = self.input_norm(residual) if update is None else self.input_norm.add(update, residual)
        attended = self.attention_out_norm(self.attention(normed, rotation, attention))
        return self.mlp_out_norm(self.mlp(self.mlp_norm.add(attended, residual)))


def _shared(config: ModelConfig, group: ModelGroup) -> dict[str, int]:
    """Return the numbers of units that the ranks share equally, by name."""
    shared, experts = {"heads": config.num_heads}, config.experts
    if experts is None or not all(experts.layers):
        shared["neurons"] = config.intermediate_size
    if experts is not None:
        parts = {"experts": experts.count} if group.expert_parallel else {"expert neurons": experts.intermediate_size}
        shared |= parts | ({"shared neurons": experts.shared_size} if experts.shared_size else {})
    return shared


class Decoder(CausalModel):
    """The decoder of a native family, or one rank's part of it.

    `embed_tokens` is missing after the first stage, unless the head has the same weights; `norm` and `lm_head` are
    missing before the last stage.
    """

    embed_tokens: TokenEmbedding
    norm: RMSNorm
    lm_head: Linear

    def __init__(self, config: ModelConfig, group: ModelGroup = ALONE) -> None:
        """Create the model. Raises ConfigurationError if the ranks of `group` cannot share it equally."""
        super().__init__()
        check_divisible(group, config.num_layers, _shared(config, group), config.num_kv_heads)
        if group.expert_parallel and config.experts is None:
            fault = f"enable_expert_parallel: {config.architecture} has no experts. Omit the option."
            raise ConfigurationError(fault, param="enable_expert_parallel")
        if config.whole_qk_norm and group.size > 1:
            fault = f"tensor_parallel: the query and key norms of {config.architecture} extend over all heads."
            raise ConfigurationError(fault, param="tensor_parallel")
        self._config = config
        self.group = group
        tokens = Shard(0, (config.vocab_size,), group=group)
        is_tied = config.tie_word_embeddings and group.is_last
        if group.is_first or is_tied:
            self.embed_tokens = TokenEmbedding(config.hidden_size, tokens)
        self._own = group.layers(config.num_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, index, group) for index in self._own)
        if group.is_last:
            self.norm = norm(config, config.hidden_size)
            self.lm_head = Linear(config.hidden_size, config.vocab_size, tokens)
        self._rotary = Rotary(config.rotary)
        self._second_rotary = None if config.second_rotary is None else Rotary(config.second_rotary)
        if is_tied:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def config(self) -> ModelConfig:
        return self._config

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return final hidden states after the norm, (tokens, hidden_size). Inputs are (tokens,) int64.

        Before the last stage, the hidden states are handed on, and meaningless here.
        """
        hidden, rotations = self._begin(token_ids), self.rotations(positions)
        update: Tensor | None = None
        for index, layer in zip(self._own, self.layers, strict=True):
            update = layer(update, hidden, rotations[self.config.rotation(index)], attention)
        if not self.group.is_last:
            self.group.hand_on(hidden if update is None else hidden.add_(update))
            return hidden
        return self.norm(hidden) if update is None else self.norm.add(update, hidden)

    def _begin(self, token_ids: Tensor) -> Tensor:
        if self.group.is_first:
            return self.embed(token_ids)
        shape = (len(token_ids), self.config.hidden_size)
        return self.group.take_over(torch.empty(shape, dtype=self.dtype, device=self.device))

    def whole_name(self, parameter: str) -> str:
        """Return a parameter's name in the whole model, whose layers are counted from the first stage on."""
        first, _, rest = parameter.partition(".")
        if first != "layers":
            return parameter
        index, _, rest = rest.partition(".")
        return f"layers.{int(index) + self._own.start}.{rest}"

    @property
    def has_experts(self) -> bool:
        return self.config.experts is not None

    @property
    def _weight(self) -> Tensor:
        return self.get_parameter(f"layers.0.{'input_norm' if self.config.pre_norms else 'attention_out_norm'}.weight")

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the input of the first layer, (tokens, hidden_size)."""
        hidden = self.embed_tokens(token_ids) if self.group.size == 1 else self._joint_embedding(token_ids)
        return hidden if self.config.embedding_scale == 1 else hidden * self.embedding_scale

    def rotations(self, positions: Tensor) -> tuple[Rotation, Rotation]:
        """Return the model's two rotations (`ModelConfig.rotation`), which are equal if it has only one."""
        plain = self._rotary(positions)
        return plain, plain if self._second_rotary is None else self._second_rotary(positions)

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings, rounded to the weights' dtype as in Gemma."""
        return float(torch.tensor(self.config.embedding_scale, dtype=self.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (rows, hidden_size) to logits (rows, vocab_size) float32."""
        logits, cap = self._joint_logits(self.lm_head(hidden).to(torch.float32)), self.config.logit_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap  # bounds large logits (Gemma 2)

    def _joint_embedding(self, token_ids: Tensor) -> Tensor:
        """Look up the tokens of this rank, and sum: all other ranks have zeros there."""
        own = self.group.share(self.config.vocab_size)
        is_own = (token_ids >= own.start) & (token_ids < own.stop)
        hidden = self.embed_tokens(torch.where(is_own, token_ids - own.start, 0))
        return self.group.sum(hidden * is_own[:, None])

    def _joint_logits(self, logits: Tensor) -> Tensor:
        """Join the logits of all ranks. Those of the last rank are padded to the length of the others."""
        if self.group.size == 1:
            return logits
        missing = -(-self.config.vocab_size // self.group.size) - logits.shape[1]
        return self.group.join(functional.pad(logits, (0, missing)))[:, : self.config.vocab_size]
