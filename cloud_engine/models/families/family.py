"""Description of a model family: the reader of its configuration, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....protocol.errors import ModelLoadError
from ..config import ExpertsConfig, ModelConfig
from ..fields import Fields
from ..rope import RotaryConfig

#: Layer parameter -> its parts in a checkpoint, which are joined along the output dimension.
SPLIT = {
    "input_norm": ("input_layernorm",),
    "attention.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.o_proj": ("self_attn.o_proj",),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
#: The same for models with experts; * stands for the number of each expert.
WITH_EXPERTS = {
    **SPLIT,
    "mlp.router": ("mlp.gate",),
    "mlp.expert_gate_up": ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
    "mlp.expert_down": ("mlp.experts.*.down_proj",),
}  #: The same with the names of DeepSeek-V3.
WITH_SHARED_EXPERTS = {
    **WITH_EXPERTS,
    "mlp.e_score_correction_bias": ("mlp.gate.e_score_correction_bias",),
    "mlp.shared.gate_up_proj": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared.down_proj": ("mlp.shared_experts.down_proj",),
}

_MAX_EXPERTS = 1024  # upper limit, because names of tensors are listed before these are checked
_MAX_HEAD_DIM = 2**16  # upper limit, because rotary frequencies are computed before weights are checked


@dataclass(frozen=True, slots=True)
class Family:
    """A model family. `architectures` are names in `config.json`; `layer_parts` is `SPLIT` or a variant.

    Keys of `layer_parts` with the name of a parameter (`.weight`) have whole names of tensors.
    """

    architectures: tuple[str, ...]
    read_config: Callable[[Fields], ModelConfig]
    layer_parts: Mapping[str, tuple[str, ...]]
    # Beginnings of the decoder's names in checkpoints, each with that of the head. A checkpoint has one of them.
    prefixes: tuple[tuple[str, str], ...] = (("model", "lm_head"),)
    # Beginnings of the names of other tensors, which belong to parts that are not served, such as a vision tower.
    ignored: tuple[str, ...] = ()
    # Parts that a checkpoint stores as one tensor (experts, inputs, outputs), and parts whose outputs alternate between
    # gate and up projection.
    stacked: tuple[str, ...] = ()
    interleaved: tuple[str, ...] = ()

    def sources(self, parameters: list[str], prefix: tuple[str, str], experts: int) -> dict[str, tuple[str, ...]]:
        """Return, for each of the model's `parameters`, the names of its tensors in a checkpoint with one `prefix`."""
        decoder, head = prefix
        top = {"embed_tokens": f"{decoder}.embed_tokens", "norm": f"{decoder}.norm", "lm_head": head}
        sources: dict[str, tuple[str, ...]] = {}
        for name in parameters:
            module, _, leaf = name.rpartition(".")
            if module in top:
                sources[name] = (f"{top[module]}.{leaf}",)
            else:
                _, index, part = module.split(".", 2)
                parts = self.layer_parts.get(f"{part}.{leaf}") or [f"{each}.{leaf}" for each in self.layer_parts[part]]
                if any("*" in each for each in parts):
                    parts = [each.replace("*", str(expert)) for expert in range(experts) for each in parts]
                sources[name] = tuple(f"{decoder}.layers.{index}.{each}" for each in parts)
        return sources

    def is_interleaved(self, name: str) -> bool:
        """Return whether the outputs of a parameter alternate between gate and up projection in checkpoints."""
        return name.split(".", 2)[-1].rpartition(".")[0] in self.interleaved

    def stored(self, name: str, parameter: Tensor) -> Tensor:
        """Return a view of `parameter` (the whole model's) in the order in which checkpoints store its numbers.

        The last dimensions of the view may be one dimension in the checkpoint.
        """
        part = name.split(".", 2)[-1].rpartition(".")[0]
        if part.rpartition(".")[2].startswith("expert_") and part not in self.stacked:
            return parameter.flatten(0, 1)  # a tensor per expert
        if self.is_interleaved(name):
            parameter = parameter.unflatten(1, (2, -1)).transpose(1, 2)
        return parameter.movedim(-1, 1) if part in self.stacked and name.endswith(".weight") else parameter


def read_decoder(fields: Fields, **differences: Any) -> ModelConfig:
    """Read a configuration with Llama's keys. `differences` replace fields that the family reads in another way."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelLoadError(f"{fields.where}: {heads} attention heads are not a multiple of {kv_heads} KV heads.")
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // heads)
    context_length = fields.integer("max_position_embeddings", 2048)
    read: dict[str, Any] = {
        "architecture": architecture(fields),
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "context_length": context_length,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
    }
    if (experts := differences.get("experts")) is not None:
        _check_experts(fields.where, experts)
    if "rotary" not in differences:
        read["rotary"] = read_rotary(fields, rope_parameters(fields), head_dim, context_length)
    return ModelConfig(**{**read, **differences})


def _check_experts(where: str, experts: ExpertsConfig) -> None:
    fault = ""
    if experts.count > _MAX_EXPERTS:
        fault = f"{experts.count} experts are too many; at most {_MAX_EXPERTS} are supported"
    elif experts.count % experts.groups or (experts.groups > 1 and experts.count < experts.groups * 2):
        fault = f"{experts.count} experts cannot be divided into {experts.groups} groups"
    elif experts.top_k * experts.groups > experts.count * min(experts.top_groups, experts.groups):
        fault = f"a token cannot use {experts.top_k} of {experts.count} experts in {experts.top_groups} groups"
    if fault:
        raise ModelLoadError(f"{where}: {fault}.")


def architecture(fields: Fields) -> str:
    names = fields.strings("architectures")
    return names[0] if names else "unknown"


def rope_parameters(fields: Fields) -> dict[str, Any]:
    """Return `rope_parameters` (transformers 5), merged with the older `rope_theta` and `rope_scaling`."""
    older = {"rope_theta": fields.number("rope_theta", 10000.0)}
    if "partial_rotary_factor" in fields.values:
        older["partial_rotary_factor"] = fields.number("partial_rotary_factor", 1.0)
    newer = {**fields.mapping("rope_scaling"), **fields.mapping("rope_parameters")}
    return {**older, **{key: value for key, value in newer.items() if value is not None}}


def read_rotary(fields: Fields, parameters: Mapping[str, Any], head_dim: int, context_length: int) -> RotaryConfig:
    """Read the rotation described by `parameters`, for heads of `head_dim` dimensions."""
    merged = dict(parameters)
    if "original_max_position_embeddings" in fields.values:  # Phi-3 has this outside the rope parameters
        merged["original_max_position_embeddings"] = fields.integer("original_max_position_embeddings")
    rotary_dim = int(head_dim * Fields(merged, fields.where).number("partial_rotary_factor", 1.0))
    if not 0 < rotary_dim <= head_dim <= _MAX_HEAD_DIM:
        raise ModelLoadError(f"{fields.where}: cannot rotate {rotary_dim} of {head_dim} dimensions of a head.")
    try:
        return RotaryConfig.from_parameters(merged, rotary_dim=rotary_dim, context_length=context_length)
    except ModelLoadError as error:
        raise ModelLoadError(f"{fields.where}: {error}") from error


def windows_of(fields: Fields, sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Return each layer's `sliding_window` or None. `layer_types` decides if it is present, else `sliding(index)`."""
    window = fields.optional_integer("sliding_window")
    layers = fields.integer("num_hidden_layers")
    types = fields.strings("layer_types")
    if window is None:
        return ()
    is_sliding = [kind == "sliding_attention" for kind in types] if types else [sliding(i) for i in range(layers)]
    return tuple(window if slides else None for slides in is_sliding) if any(is_sliding) else ()
