"""Gemma 3 (its text tower): five sliding-window layers per full-attention layer, each kind with its own rotation."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from .family import SPLIT, Family, read_decoder, read_rotary, windows_of

_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
}
_PARTS = {
    **SPLIT,
    "attention_out_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_out_norm": ("post_feedforward_layernorm",),
}


def read_config(fields: Fields) -> ModelConfig:
    whole = fields.values
    fields = Fields({**_DEFAULTS, **whole, **fields.mapping("text_config")}, fields.where)
    if "architectures" in whole:  # the text configuration may name its own
        fields.values["architectures"] = whole["architectures"]
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    fields.only("use_bidirectional_attention", False)
    fields.only("attn_logit_softcapping", None)
    pattern = fields.integer("sliding_window_pattern", 6)
    head_dim, context_length = fields.integer("head_dim"), fields.integer("max_position_embeddings")
    bias = fields.flag("attention_bias")
    windows = windows_of(fields, lambda layer: (layer + 1) % pattern != 0)
    by_type = Fields(fields.mapping("rope_parameters"), fields.where)
    # Before transformers 5, RoPE scaling applied to full-attention layers only, and each kind had its own theta key.
    full = {"rope_theta": fields.number("rope_theta", 1e6), **fields.mapping("rope_scaling")}
    sliding = {"rope_theta": fields.number("rope_local_base_freq", 1e4)}
    return read_decoder(
        fields,
        rotary=read_rotary(fields, {**full, **by_type.mapping("full_attention")}, head_dim, context_length),
        second_rotary=read_rotary(
            fields, {**sliding, **by_type.mapping("sliding_attention")}, head_dim, context_length
        ),
        windows=windows,
        uses_second=tuple(window is not None for window in windows),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        unit_offset_norms=True,
        post_norms=True,
        activation="gelu_tanh",
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        logit_soft_cap=fields.optional_number("final_logit_softcapping"),
    )


_PREFIXES = (
    ("model", "lm_head"),
    ("language_model.model", "language_model.lm_head"),  # released files, whose text tower is in a wrapper
    ("model.language_model", "lm_head"),
)
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
GEMMA3 = Family(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), read_config, _PARTS, _PREFIXES, _VISION)
