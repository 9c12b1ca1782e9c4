"""gpt-oss: attention with sinks, a window in every other layer, and experts with biases and a clamped SwiGLU."""

from __future__ import annotations

from ..config import ExpertsConfig, ModelConfig
from ..fields import Fields
from .family import SPLIT, Family, read_decoder, read_rotary, rope_parameters, windows_of

_PARTS = {
    **SPLIT,
    "attention.sinks.weight": ("self_attn.sinks",),
    "mlp.router": ("mlp.router",),
    "mlp.expert_gate_up.weight": ("mlp.experts.gate_up_proj",),
    "mlp.expert_gate_up.bias": ("mlp.experts.gate_up_proj_bias",),
    "mlp.expert_down.weight": ("mlp.experts.down_proj",),
    "mlp.expert_down.bias": ("mlp.experts.down_proj_bias",),
}
_DEFAULTS = {"attention_bias": True, "head_dim": 64, "max_position_embeddings": 131_072, "rope_theta": 150_000.0}
_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def read_config(fields: Fields) -> ModelConfig:
    fields = Fields({**_DEFAULTS, **fields.values}, fields.where)
    fields.only("hidden_act", "silu")
    fields.only("swiglu_limit", 7.0)
    fields.only("swiglu_alpha", 1.702)
    head_dim, context_length = fields.integer("head_dim"), fields.integer("max_position_embeddings")
    has_rope = fields.values.keys() & {"rope_parameters", "rope_scaling"}
    parameters = {**({} if has_rope else _ROPE), **rope_parameters(fields)}
    experts = ExpertsConfig(
        count=fields.integer("num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        layers=(True,) * fields.integer("num_hidden_layers"),
        bias=True,
    )
    bias = fields.flag("attention_bias")
    return read_decoder(
        fields,
        rotary=read_rotary(fields, parameters, head_dim, context_length),
        windows=windows_of(fields, lambda layer: layer % 2 == 0),
        qkv_bias=bias,
        output_bias=bias,
        activation="swigluoai",
        experts=experts,
        has_sinks=True,
    )


_EXPERTS = ("mlp.expert_gate_up", "mlp.expert_down")
GPT_OSS = Family(("GptOssForCausalLM",), read_config, _PARTS, stacked=_EXPERTS, interleaved=_EXPERTS[:1])
