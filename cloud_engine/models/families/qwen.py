"""Qwen2 and Qwen2.5 (biases on query, key and value), and Qwen3 (instead a norm over each head of query and key)."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..config import ModelConfig
from ..fields import Fields
from .family import SPLIT, Family, read_decoder, windows_of


def read_qwen3(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    head_dim = fields.integer("head_dim", 128)
    fields = Fields({**fields.values, "head_dim": head_dim}, fields.where)
    return _read(fields, qkv_bias=bias, output_bias=bias, qk_norm=True)


def _read(fields: Fields, **differences: Any) -> ModelConfig:
    fields.only("hidden_act", "silu")
    first_sliding = fields.integer("max_window_layers", 28) if fields.flag("use_sliding_window") else None
    windows = () if first_sliding is None else windows_of(fields, lambda layer: layer >= first_sliding)
    return read_decoder(fields, windows=windows, **differences)


QWEN2 = Family(("Qwen2ForCausalLM",), partial(_read, qkv_bias=True), SPLIT)
QWEN3 = Family(("Qwen3ForCausalLM",), read_qwen3, SPLIT)
