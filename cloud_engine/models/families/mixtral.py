"""Mixtral: the attention of Mistral, and two of eight experts per token in every layer (Jiang et al. 2024)."""

from __future__ import annotations

from ..config import ExpertsConfig, ModelConfig
from ..fields import Fields
from .family import WITH_EXPERTS, Family, read_decoder, windows_of

_PARTS = {
    **WITH_EXPERTS,
    "mlp.router": ("block_sparse_moe.gate",),
    "mlp.expert_gate_up": ("block_sparse_moe.experts.*.w1", "block_sparse_moe.experts.*.w3"),
    "mlp.expert_down": ("block_sparse_moe.experts.*.w2",),
}


def read_config(fields: Fields) -> ModelConfig:
    fields.only("hidden_act", "silu")
    experts = ExpertsConfig(
        count=fields.integer("num_local_experts", 8),
        top_k=fields.integer("num_experts_per_tok", 2),
        intermediate_size=fields.integer("intermediate_size"),
        layers=(True,) * fields.integer("num_hidden_layers"),
    )
    return read_decoder(fields, experts=experts, windows=windows_of(fields, lambda _: True))


MIXTRAL = Family(("MixtralForCausalLM",), read_config, _PARTS)
