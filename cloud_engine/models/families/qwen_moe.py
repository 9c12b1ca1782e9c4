"""Qwen2-MoE (with a gated shared expert) and Qwen3-MoE: the attention of Qwen2 and Qwen3, and routed experts."""

from __future__ import annotations

from typing import Any

from ....protocol.errors import ModelLoadError
from ..config import ExpertsConfig, ModelConfig
from ..fields import Fields
from .family import WITH_EXPERTS, Family, read_decoder


def _read(fields: Fields, **differences: Any) -> ModelConfig:
    fields.only("hidden_act", "silu")
    fields.only("use_sliding_window", False)
    return read_decoder(fields, experts=_experts(fields), **differences)


def read_qwen2(fields: Fields) -> ModelConfig:
    return _read(fields, qkv_bias=Fields({"qkv_bias": True, **fields.values}, fields.where).flag("qkv_bias"))


def read_qwen3(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return _read(fields, qkv_bias=bias, output_bias=bias, qk_norm=True)


def _experts(fields: Fields) -> ExpertsConfig:
    layers, step = fields.integer("num_hidden_layers"), fields.integer("decoder_sparse_step", 1)
    dense: Any = fields.values.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(isinstance(each, int) for each in dense):
        raise ModelLoadError(f"{fields.where}: mlp_only_layers must be a list of numbers of layers, got {dense!r}.")
    return ExpertsConfig(
        count=fields.integer("num_experts", fields.optional_integer("num_local_experts")),  # transformers 5 renames it
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
        renormalizes=fields.flag("norm_topk_prob"),
        shared_size=fields.optional_integer("shared_expert_intermediate_size") or 0,
        gates_shared="shared_expert_intermediate_size" in fields.values,
    )


_SHARED = {
    "mlp.shared.gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared.down_proj": ("mlp.shared_expert.down_proj",),
    "mlp.shared_gate": ("mlp.shared_expert_gate",),
}
QWEN2_MOE = Family(("Qwen2MoeForCausalLM",), read_qwen2, {**WITH_EXPERTS, **_SHARED})
QWEN3_MOE = Family(("Qwen3MoeForCausalLM",), read_qwen3, WITH_EXPERTS)
