"""Attention over a paged KV cache in plain torch, on any device, using torch's fused attention if that is faster."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from ..kv_cache.reference import write_kv_reference_
from ..kv_cache.types import HeadNorms, HeadTransform, Rotation
from .ragged_batch import RaggedBatch
from .torch_groups import AttentionGroup, CacheShape, plan_groups
from .types import LayerAttention


class TorchAttention:
    """Attention over `cache` (layers, blocks, 2 * kv_heads, block_size, head_dim), keys before values, for one pass.

    `group_size`: query heads per KV head. `batch_invariant`: a row has the same bits in every batch.
    """

    def __init__(self, cache: Tensor, batch: RaggedBatch, *, group_size: int, batch_invariant: bool = False) -> None:
        self._cache = cache
        self._spans = batch.spans
        self._num_rows = batch.num_real_rows
        self._slots = torch.from_numpy(batch.slots()).to(cache.device)
        self._group_size = group_size
        self._batch_invariant = batch_invariant
        self._groups_of: dict[int | None, list[AttentionGroup]] = {}

    def attend(
        self, layer: LayerAttention, projected: Tensor, rotation: Rotation | None, norms: HeadNorms | None = None
    ) -> Tensor:
        """Implement `Attention.attend`."""
        cache, num_rows = self._cache[layer.index], self._num_rows
        write_kv_reference_(projected, cache.transpose(1, 2), self._slots, HeadTransform(norms), rotation)
        query = projected[:, : -cache.shape[1]]
        groups = self._groups(layer.window, query.dtype)
        if len(groups) == 1 and groups[0].kept is None:  # no query is padding
            attended = self._attend_group(groups[0], layer, query[:num_rows].contiguous(), cache)
            return functional.pad(attended, (0, 0, 0, 0, 0, len(query) - num_rows))
        out = query.new_zeros(query.shape)
        for group in groups:
            attended = self._attend_group(group, layer, query.index_select(0, group.rows), cache)
            rows = group.rows
            if group.kept is not None:
                attended, rows = attended.index_select(0, group.kept), rows.index_select(0, group.kept)
            out.index_copy_(0, rows, attended)
        return out

    def _groups(self, window: int | None, dtype: torch.dtype) -> list[AttentionGroup]:
        """Return the groups for all layers with this window, planned on first use."""
        if window not in self._groups_of:
            shape = CacheShape(self._cache.shape[3], self._cache.shape[2] // 2)
            groups = plan_groups(self._spans, shape, window, batch_invariant=self._batch_invariant)
            self._groups_of[window] = [self._placed(group, dtype) for group in groups]
        return self._groups_of[window]

    def _is_fused(self, group: AttentionGroup) -> bool:
        return self._batch_invariant or not group.is_short

    def _placed(self, group: AttentionGroup, dtype: torch.dtype) -> AttentionGroup:
        """Move the group to the device. Adapt the mask to torch's fused kernel, which needs the queries' dtype."""
        device, mask = self._cache.device, group.mask
        if self._is_fused(group):
            mask = mask.to(dtype).repeat(1, 1, self._group_size, 1)
        return replace(
            group,
            rows=group.rows.to(device),
            pages=group.pages.to(device),
            mask=mask.to(device),
            padding=group.padding.to(device),
            kept=None if group.kept is None else group.kept.to(device),
        )

    def _attend_group(self, group: AttentionGroup, layer: LayerAttention, query: Tensor, cache: Tensor) -> Tensor:
        """Attend with `query` (sequences * queries, heads, head_dim) over the group's blocks; returns the same shape.

        Query heads of one KV head are folded into the query dimension, so that keys are never repeated.
        """
        heads, head_dim = query.shape[1:]
        split = (group.sequences, group.queries, heads // self._group_size, self._group_size, head_dim)
        folded = query.view(split).permute(0, 2, 3, 1, 4).reshape(group.sequences, split[2], -1, head_dim)
        stored = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache  # torch selects no FP8
        pages = stored.view(-1, *cache.shape[2:]).index_select(0, group.pages).view(cache.dtype).to(query.dtype)
        pages = pages.view(2, group.sequences, split[2], -1, head_dim)
        keys, values = pages.masked_fill_(group.padding[:, None, :, None], 0)  # padding may hold NaN
        mask, scale = group.mask, layer.scale
        if layer.sinks is not None:  # a key and a value of zeros, whose score is the sink
            keys, values = (functional.pad(each, (0, 0, 0, 1)) for each in (keys, values))
            mask = _with_sinks(mask, layer.sinks, split[:4])
        if self._is_fused(group):
            attended = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
        else:
            attended = _attend_short(folded.float().mul_(scale), keys, values, mask)
        unfolded = attended.view(group.sequences, split[2], self._group_size, group.queries, head_dim)
        return unfolded.permute(0, 3, 1, 2, 4).reshape(-1, heads, head_dim)


def _with_sinks(mask: Tensor, sinks: Tensor, split: tuple[int, int, int, int]) -> Tensor:
    """Append a key with the score of each head's sink: (sequences, kv_heads, shared heads * queries, keys + 1).

    `split`: sequences, queries, KV heads, and query heads that share a KV head.
    """
    sequences, queries, kv_heads, shared = split
    of_head = mask[:, :, :queries].expand(sequences, kv_heads * shared, queries, -1)
    of_sink = sinks.to(mask.dtype).view(1, -1, 1, 1).expand(sequences, -1, queries, 1)
    return torch.cat((of_head, of_sink), -1).view(sequences, kv_heads, shared * queries, -1)


def _attend_short(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attend with few queries over many keys, (sequences, kv_heads, queries or keys, head_dim).

    `query` is float32 and scaled. Uses two products over the whole batch, with scores in float32. Torch's fused kernel
    multiplies a tiny matrix for every sequence and head, which takes 1.5 times as long.
    """
    sequences, kv_heads, num_queries, _ = query.shape
    scores = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1).float().transpose(1, 2))
    scores.view(sequences, -1, *mask.shape[2:]).add_(mask)
    weights = scores.softmax(dim=-1).to(values.dtype)
    return torch.bmm(weights, values.flatten(0, 1)).view(sequences, kv_heads, num_queries, -1)
