"""OLMo 2: norms after attention and feed-forward instead of before, and over all heads of query and key."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from .family import SPLIT, Family, read_decoder

_PARTS = {
    **{name: parts for name, parts in SPLIT.items() if name not in ("input_norm", "mlp_norm")},
    "attention_out_norm": ("post_attention_layernorm",),
    "mlp_out_norm": ("post_feedforward_layernorm",),
}


def read_config(fields: Fields) -> ModelConfig:
    fields.only("hidden_act", "silu")
    bias = fields.flag("attention_bias")
    return read_decoder(
        fields, qkv_bias=bias, output_bias=bias, qk_norm=True, whole_qk_norm=True, pre_norms=False, post_norms=True
    )


OLMO2 = Family(("Olmo2ForCausalLM",), read_config, _PARTS)
