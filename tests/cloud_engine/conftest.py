"""Random-weight models, small enough for a test and different enough from each other to matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from updraft.cloud_engine.models.llama import Llama
from updraft.cloud_engine.models.loader import load_model

torch.set_num_threads(1)

SHAPES: dict[str, dict[str, Any]] = {
    "gqa-tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "mha-untied": {"num_key_value_heads": 4, "tie_word_embeddings": False, "rope_theta": 500000.0},
    "mqa-wide-head": {"num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": False},
}


def make_reference(seed: int = 0, **overrides: Any) -> transformers.LlamaForCausalLM:
    """A random transformers model whose logits are peaked enough to have opinions."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        **overrides,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).float().eval()


def perturbed(model: Llama, amount: float, seed: int = 1) -> Llama:
    """A copy that mostly agrees with `model`: a draft with partial acceptance."""
    generator = torch.Generator().manual_seed(seed)
    twin = Llama(model.config).requires_grad_(False).eval()
    twin.load_state_dict(model.state_dict())
    for parameter in twin.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=amount * float(parameter.std()))
    return twin


@pytest.fixture(scope="session")
def reference() -> transformers.LlamaForCausalLM:
    return make_reference(**SHAPES["gqa-tied"])


@pytest.fixture(scope="session")
def model_folder(reference: transformers.LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    reference.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target(model_folder: Path) -> Llama:
    return load_model(model_folder)


@pytest.fixture(scope="session")
def draft(target: Llama) -> Llama:
    return perturbed(target, 0.05)
