"""transformers' attention with keys and values that are rounded to FP8: the reference for an FP8 cache."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    del mask
    groups = module.num_key_value_groups
    key, value = (each.to(torch.float8_e4m3fn).float().repeat_interleave(groups, 1) for each in (key, value))
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    seen = (distance >= 0) & (distance < (options.get("sliding_window") or query.shape[2]))
    return functional.scaled_dot_product_attention(query, key, value, seen, scale=scaling).transpose(1, 2), None


def with_rounded_cache(reference: Any) -> Any:
    """Let `reference` round its keys and values from now on."""
    transformers.AttentionInterface.register("rounded", _attend)
    reference.set_attn_implementation("rounded")
    return reference
