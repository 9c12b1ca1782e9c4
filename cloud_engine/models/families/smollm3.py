"""SmolLM3: like Llama, but some layers do not rotate (NoPE)."""

from __future__ import annotations

from dataclasses import replace

from ....protocol.errors import ModelLoadError
from ..config import ModelConfig
from ..fields import Fields
from ..rope import RotaryConfig
from .family import SPLIT, Family, read_decoder, windows_of


def read_config(fields: Fields) -> ModelConfig:
    fields.only("hidden_act", "silu")
    layers = fields.integer("num_hidden_layers")
    interval = fields.integer("no_rope_layer_interval", 4)
    rotates = fields.values.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(rotates, list) or len(rotates) != layers or not set(rotates) <= {0, 1}:
        raise ModelLoadError(f"{fields.where}: no_rope_layers must have 0 or 1 for each of {layers} layers.")
    bias = fields.flag("attention_bias")
    windows = windows_of(fields, lambda _: True) if fields.flag("use_sliding_window") else ()
    read = read_decoder(
        fields,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        windows=windows,
        uses_second=tuple(not each for each in rotates),
    )
    return replace(read, second_rotary=RotaryConfig((0.0,) * (read.head_dim // 2)))  # angles of 0


SMOLLM3 = Family(("SmolLM3ForCausalLM",), read_config, SPLIT)
