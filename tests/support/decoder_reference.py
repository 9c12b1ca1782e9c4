"""Small transformers models of every family with random weights: the reference for Updraft's decoders."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 97
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 3.5, 4.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, **FACTORS}

LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}

#: Test models by name: architecture, and configuration values in addition to the sizes that all models share.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa-tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-mha-untied": ("Llama", {"num_key_value_heads": 4, "rope_theta": 500000.0}),
    "llama-mqa-wide-head": ("Llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama-biases": ("Llama", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "llama-3.1": ("Llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA3_SCALING}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral-window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 20}),
    "mistral-block-window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 16}),
    "mistral-no-window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"num_key_value_heads": 2, "rope_parameters": YARN}),
    "qwen2-window": (
        "Qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3",
        {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 18, "query_pre_attn_scalar": 24},
    ),
    "gemma3-scaled": (
        "Gemma3",
        {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "sliding_window": 33,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "smollm3": ("SmolLM3", {"num_key_value_heads": 2, "no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2, "rms_norm_eps": 1e-6}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "sliding_window": 40}),
    "phi3-short": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": 20}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_key_value_heads": 2,
            **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            **{"num_key_value_heads": 2, "head_dim": 32, "mlp_only_layers": [1], "norm_topk_prob": True},
            **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
        },
    ),
    "qwen3-moe-every-other": (
        "Qwen3Moe",
        {
            **{"num_key_value_heads": 2, "decoder_sparse_step": 2},
            **{"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 40},
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            **{"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 20, "intermediate_size": 64},
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {**YARN, "truncate": False}},
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            **{"num_key_value_heads": 2, "use_qk_norm": True, "attention_bias": True, "moe_intermediate_size": 32},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **LATENT,
            **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None, "first_k_dense_replace": 1},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
            **{"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.3},
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **LATENT,
            **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "first_k_dense_replace": 1},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
            **{"n_group": 2, "topk_group": 1, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        },
    ),
}
#: Shapes whose layers have experts.
EXPERT_SHAPES = tuple(shape for shape, (_, options) in SHAPES.items() if any("experts" in key for key in options))
#: Only for long sequences: for short ones, transformers uses `short_factor`; Updraft's choice of factors depends on the
#: context length instead.
LONG_ONLY = ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 40})


def reference_model(architecture: str = "Llama", **overrides: Any) -> Any:
    """Return a small transformers model in float32. Norm weights and biases are random too."""
    torch.manual_seed(0)
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,  # peaked logits, so that a tolerance of 1e-4 is strict
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **overrides,
    }
    names = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"), "GPT2": ("GPT2Config", "GPT2LMHeadModel")}
    config_name, model_name = names.get(architecture, (f"{architecture}Config", f"{architecture}ForCausalLM"))
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**options)).float().eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(tensor, std=0.1)
        elif isinstance(tensor, torch.nn.Parameter) and (tensor.dim() == 1 or name.endswith("_bias")):
            torch.nn.init.normal_(tensor, mean=0.5, std=0.2)
    return model


def expected_logprobs(reference: Any, tokens: list[int]) -> torch.Tensor:
    """Return log-probabilities (tokens, vocabulary), computed in one forward pass over `tokens`."""
    with torch.inference_mode():
        return reference(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
