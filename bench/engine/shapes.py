"""Models to measure: the packaged model, or random weights in the shape of a real model, without a download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...cloud_engine.models.config import ModelConfig
from ...cloud_engine.models.decoder import Decoder
from ...cloud_engine.models.fields import Fields
from ...cloud_engine.models.loading.loader import family_of, load_model
from ...embedded import pocket
from ...protocol.errors import ConfigurationError

#: Hugging Face configurations of real models.
SHAPES: Mapping[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}


def model_folder(shape: str, model_dir: Path) -> Path:
    """Return the folder of a model: `pocket`, or a name in `SHAPES` with random bf16 weights under `model_dir`.

    Raises ConfigurationError for an unknown name.
    """
    if shape == "pocket":
        return pocket.pocket_large_folder()
    if shape not in SHAPES:
        raise ConfigurationError(f"Unknown shape {shape!r}: choose from pocket, {', '.join(SHAPES)}.", param="shape")
    folder = model_dir / shape
    if not (folder / "model.safetensors").exists():
        _write_random(SHAPES[shape], folder)
    return folder


def shape_config(shape: str) -> ModelConfig:
    """Return the configuration of a name in `SHAPES`, or pocket-small's for `pocket`."""
    if shape == "pocket":
        return load_model(pocket.pocket_small_folder()).config
    fields = Fields(SHAPES[shape], shape)
    return family_of(fields).read_config(fields)


def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Create a model with random weights directly on `device`, initialised like an untrained model, without a file."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Decoder(config)
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
        else:
            torch.nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
    return model


def _write_random(config: dict[str, Any], folder: Path) -> None:
    import transformers

    torch.manual_seed(0)
    kind = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16)
    model.save_pretrained(folder)
