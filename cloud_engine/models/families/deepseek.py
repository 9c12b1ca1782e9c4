"""DeepSeek-V2 and V3: latent attention, and experts in groups next to shared ones."""

from __future__ import annotations

import math
from typing import Any

from ..config import ExpertsConfig, LatentConfig, ModelConfig
from ..fields import Fields
from .family import WITH_SHARED_EXPERTS, Family, read_decoder, read_rotary, rope_parameters

_PARTS = {
    **WITH_SHARED_EXPERTS,
    "attention.q_down": ("self_attn.q_a_proj",),
    "attention.q_norm": ("self_attn.q_a_layernorm",),
    "attention.q_proj": ("self_attn.q_proj",),
    "attention.q_up": ("self_attn.q_b_proj",),
    "attention.kv_down": ("self_attn.kv_a_proj_with_mqa",),
    "attention.kv_norm": ("self_attn.kv_a_layernorm",),
    "attention.kv_up": ("self_attn.kv_b_proj",),
}


def read_v2(fields: Fields) -> ModelConfig:
    fields = Fields({"first_k_dense_replace": 0, "n_shared_experts": 2, **fields.values}, fields.where)
    fields.only("topk_method", "greedy", "group_limited_greedy")
    fields.only("scoring_func", "softmax")
    fields.only("norm_topk_prob", False)
    if fields.values.get("topk_method", "greedy") == "greedy":
        fields.values |= {"n_group": 1, "topk_group": 1}
    return _read(fields, read_experts(fields, scores="softmax", has_correction=False, group_scores=1))


def read_v3(fields: Fields) -> ModelConfig:
    fields = Fields({"first_k_dense_replace": 3, "norm_topk_prob": True, **fields.values}, fields.where)
    fields.only("topk_method", "noaux_tc")
    fields.only("scoring_func", "sigmoid")
    return _read(fields, read_experts(fields))


def read_experts(fields: Fields, **differences: Any) -> ExpertsConfig:
    """Read experts with DeepSeek-V3's keys. `differences` replace fields that a family has in another way."""
    fields.only("moe_layer_freq", 1)
    layers, dense = fields.integer("num_hidden_layers"), fields.number("first_k_dense_replace", 1)
    neurons = fields.integer("moe_intermediate_size")
    read: dict[str, Any] = {
        "count": fields.integer("n_routed_experts"),
        "top_k": fields.integer("num_experts_per_tok"),
        "intermediate_size": neurons,
        "layers": tuple(layer >= dense for layer in range(layers)),
        "scores": "sigmoid",
        "renormalizes": fields.flag("norm_topk_prob"),
        "scaling": fields.number("routed_scaling_factor", 1.0),
        "groups": fields.integer("n_group", 1),
        "top_groups": fields.integer("topk_group", 1),
        "has_correction": True,
        "shared_size": neurons * fields.integer("n_shared_experts", 1),
    }
    return ExpertsConfig(**{**read, **differences})


def _read(fields: Fields, experts: ExpertsConfig) -> ModelConfig:
    fields.only("hidden_act", "silu")
    heads, rotated = fields.integer("num_attention_heads"), fields.integer("qk_rope_head_dim", 64)
    head_dim = fields.integer("qk_nope_head_dim", 128) + rotated
    parameters, context_length = rope_parameters(fields), fields.integer("max_position_embeddings", 2048)
    scaling = Fields(parameters, fields.where)
    factor, weight = scaling.number("factor", 1.0), scaling.number("mscale_all_dim", 0.0)
    temperature = 0.1 * weight * math.log(factor) + 1 if factor > 1 and weight else 1.0  # of YaRN, on both sides
    interleaved = Fields({"rope_interleave": True, **fields.values}, fields.where).flag("rope_interleave")
    bias = fields.flag("attention_bias")
    return read_decoder(
        fields,
        head_dim=head_dim,
        num_kv_heads=heads,
        rotary=read_rotary(fields, parameters, rotated, context_length),
        attention_scale=head_dim**-0.5 * temperature**2,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        experts=experts,
        latent=LatentConfig(
            rank=fields.integer("kv_lora_rank", 512),
            query_rank=fields.optional_integer("q_lora_rank"),
            rotated=rotated,
            interleaved=interleaved,
            value_dim=fields.integer("v_head_dim", 128),
        ),
    )


DEEPSEEK2 = Family(("DeepseekV2ForCausalLM",), read_v2, _PARTS)
# The last layer of V3's checkpoint predicts a second token, and is not served.
DEEPSEEK3 = Family(("DeepseekV3ForCausalLM",), read_v3, _PARTS, ignored=("model.layers.61.",))
