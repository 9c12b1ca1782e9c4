"""GLM-4.5: partial rotation, and experts that are chosen as in DeepSeek-V3."""

from __future__ import annotations

from ..config import ModelConfig
from ..fields import Fields
from .deepseek import read_experts
from .family import WITH_SHARED_EXPERTS, Family, read_decoder


def read_config(fields: Fields) -> ModelConfig:
    fields = Fields({"partial_rotary_factor": 0.5, "norm_topk_prob": True, **fields.values}, fields.where)
    fields.only("hidden_act", "silu")
    bias, norms = fields.flag("attention_bias"), fields.flag("use_qk_norm")
    return read_decoder(fields, qkv_bias=bias, qk_norm=norms, experts=read_experts(fields))


# The checkpoints' last layer predicts a second token, and is not served.
_LAST = ("model.layers.46.", "model.layers.92.")
GLM4_MOE = Family(("Glm4MoeForCausalLM",), read_config, WITH_SHARED_EXPERTS, ignored=_LAST)
