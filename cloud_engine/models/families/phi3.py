"""Phi-3 and Phi-4 mini: like Llama, but with fused projections in the checkpoint, partial rotation and LongRoPE."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from .family import SPLIT, Family, read_decoder, read_rotary, rope_parameters, windows_of

_PARTS = {**SPLIT, "attention.qkv_proj": ("self_attn.qkv_proj",), "mlp.gate_up_proj": ("mlp.gate_up_proj",)}


def read_config(fields: Fields) -> ModelConfig:
    fields.only("hidden_act", "silu")
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
    context_length = fields.integer("max_position_embeddings", 4096)
    parameters = rope_parameters(fields)
    if parameters.get("rope_type", parameters.get("type")) in ("su", "yarn"):  # LongRoPE's names in early checkpoints
        parameters["rope_type"] = "longrope"
    rotary = read_rotary(fields, parameters, head_dim, context_length)
    eps, windows = fields.number("rms_norm_eps", 1e-5), windows_of(fields, lambda _: True)
    return read_decoder(fields, rotary=rotary, rms_norm_eps=eps, windows=windows)


PHI3 = Family(("Phi3ForCausalLM",), read_config, _PARTS)
