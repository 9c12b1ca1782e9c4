"""Multi-head latent attention (DeepSeek-V2, 2024), whose keys and values are expanded before they are cached."""

from __future__ import annotations

from torch import Tensor, nn

from ...kernels.attention.types import Attention, LayerAttention
from ...kernels.kv_cache.types import Rotation
from .config import LatentConfig, ModelConfig
from .layers import Linear, RMSNorm
from .sharding import ModelGroup, Shard

_EPS = 1e-6  # of the norms of latents, whatever the eps of other norms


class LatentAttention(nn.Module):
    """Attention whose keys and values come from one latent vector per row. Ranks share the heads.

    A part of each query and key is rotated; this part of the key is the same in all heads.
    """

    def __init__(self, config: ModelConfig, latent: LatentConfig, index: int, group: ModelGroup) -> None:
        super().__init__()
        size, heads, bias = config.hidden_size, config.num_heads, config.qkv_bias
        self._latent, self._group, self._head_dim = latent, group, config.head_dim
        by_head, rank = Shard(0, (heads,), config.head_dim, group), latent.query_rank
        if rank is None:
            self.q_proj = Linear(size, heads * config.head_dim, by_head)
        else:
            self.q_down = Linear(size, rank, Shard(0, (rank,)), bias=bias)
            self.q_norm = RMSNorm(rank, _EPS)
            self.q_up = Linear(rank, heads * config.head_dim, by_head)
        outputs = latent.rank + latent.rotated
        self.kv_down = Linear(size, outputs, Shard(0, (outputs,)), bias=bias)
        self.kv_norm = RMSNorm(latent.rank, _EPS)
        each = self._head_dim - latent.rotated + latent.value_dim
        self.kv_up = Linear(latent.rank, heads * each, Shard(0, (heads,), each, group))
        inputs = Shard(1, (heads,), latent.value_dim, group)
        self.o_proj = Linear(heads * latent.value_dim, size, inputs, bias=config.output_bias)
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.layer = LayerAttention(index - group.layers(config.num_layers).start, scale)

    def forward(self, hidden: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        rows, rotated, value_dim = len(hidden), self._latent.rotated, self._latent.value_dim
        plain = self._head_dim - rotated
        has_rank = self._latent.query_rank is not None
        query = self.q_up(self.q_norm(self.q_down(hidden))) if has_rank else self.q_proj(hidden)
        query = query.view(rows, -1, self._head_dim)
        latent, key_rotated = self.kv_down(hidden).split((self._latent.rank, rotated), dim=1)
        expanded = self.kv_up(self.kv_norm(latent.contiguous())).view(rows, -1, plain + value_dim)
        key, value = expanded.split((plain, value_dim), dim=2)
        # The kernels rotate the first dimensions of a head, and cache values as wide as keys.
        heads = query.shape[1]
        projected = hidden.new_zeros(rows, 3 * heads, self._head_dim)
        projected[:, :heads, :rotated] = self._in_halves(query[..., plain:])
        projected[:, :heads, rotated:] = query[..., :plain]
        projected[:, heads : 2 * heads, :rotated] = self._in_halves(key_rotated)[:, None]
        projected[:, heads : 2 * heads, rotated:] = key
        projected[:, 2 * heads :, :value_dim] = value
        mixed = attention.attend(self.layer, projected, rotation)
        return self._group.sum(self.o_proj(mixed[..., :value_dim].reshape(rows, -1)))

    def _in_halves(self, dims: Tensor) -> Tensor:
        """Return the dimensions of each pair half the size apart, which is where the kernels rotate them."""
        return dims.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self._latent.interleaved else dims
