"""Writes a small transformers model as a GGUF file, in the layout of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
}


def write_gguf(model: Any, path: Path, quantization: str | Callable[[str], str] = "F32") -> None:
    """Write `model` with matrices in `quantization`, vectors in F32, and a vocabulary of meaningless tokens.

    `quantization` may be a function of the tensor's name in transformers.
    """
    config = model.config
    arch = ARCHITECTURES[config.architectures[0] if config.architectures else type(model).__name__]
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, config, arch)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:]).swapaxes(1, 2)
            array = np.ascontiguousarray(array.reshape(tensor.shape))
        if arch == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        wanted = quantization if isinstance(quantization, str) else quantization(name)
        kind = gguf.GGMLQuantizationType[wanted if array.ndim == 2 else "F32"]
        data = array if kind == gguf.GGMLQuantizationType.F32 else gguf.quants.quantize(array, kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data, raw_dtype=kind)
    _write_rope(writer, config, arch)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dequantise(model: Any, quantization: Callable[[str], str]) -> None:
    """Round a model's matrices in place as `write_gguf` stores them."""
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 2 and not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            kind = gguf.GGMLQuantizationType[quantization(name)]
            rounded = gguf.quants.dequantize(gguf.quants.quantize(tensor.float().numpy(), kind), kind)
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(rounded)))


def _write_metadata(writer: Any, config: Any, arch: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch in ("gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    tokens = [f"t{i}" for i in range(config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["t 0"])


def _write_rope(writer: Any, config: Any, arch: str) -> None:
    parameters = config.rope_parameters
    parameters = parameters.get("full_attention", parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(rotary_dim)
    writer.add_rope_freq_base(float(parameters["rope_theta"]))
    kind = parameters["rope_type"]
    nested = parameters.get("original_max_position_embeddings")
    original = getattr(config, "original_max_position_embeddings", None) or nested
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(parameters["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(original)
    if kind == "longrope":
        writer.add_rope_scaling_attn_factors(_attention_factor(config, original))
        writer.add_tensor("rope_factors_long.weight", np.array(parameters["long_factor"], dtype=np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(parameters["short_factor"], dtype=np.float32))
    if kind == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = parameters["rope_theta"] ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy().astype(np.float32))


def _attention_factor(config: Any, original: int) -> float:
    scale = config.max_position_embeddings / original
    return 1.0 if scale <= 1 else float(np.sqrt(1 + np.log(scale) / np.log(original)))
