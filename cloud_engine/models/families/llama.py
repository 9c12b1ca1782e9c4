"""Llama 2, Llama 3 and models with the same architecture: the decoder without changes."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from .family import SPLIT, Family, read_decoder


def read_config(fields: Fields) -> ModelConfig:
    fields.only("hidden_act", "silu")
    bias = fields.flag("attention_bias")
    return read_decoder(fields, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


LLAMA = Family(("LlamaForCausalLM",), read_config, SPLIT)
