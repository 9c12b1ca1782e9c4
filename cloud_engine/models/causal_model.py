"""The interface of a causal language model over ragged batches, which the engine serves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...kernels.attention.types import Attention
from .config import CausalConfig
from .sharding import ALONE, ModelGroup


class CausalModel(nn.Module):
    """A causal language model, or one rank's part of it. Only `attention` knows the sequence of each row."""

    group: ModelGroup = ALONE

    @property
    def config(self) -> CausalConfig:
        raise NotImplementedError

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return final hidden states, (tokens, hidden_size). Inputs are (tokens,) int64."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (rows, hidden_size) to logits (rows, vocab_size) float32."""
        raise NotImplementedError

    @property
    def has_experts(self) -> bool:
        """Return whether rows are routed to experts, so that padding rows would read more weights."""
        return False

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        return self._weight.device

    @property
    def num_heads(self) -> int:
        """Number of this rank's query heads."""
        return len(self.group.share(self.config.num_heads))

    @property
    def num_kv_heads(self) -> int:
        """Number of this rank's KV heads."""
        return len(self.group.share(self.config.num_kv_heads))

    @property
    def num_own_layers(self) -> int:
        """Number of this stage's layers."""
        return len(self.group.layers(self.config.num_layers))

    @property
    def _weight(self) -> Tensor:
        """A tensor of the weights' type on their device, which is never packed."""
        raise NotImplementedError
