"""The tiny models of `tiny_gguf`, written once per session."""

from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import (
    CONTEXT,
    HIDDEN,
    LAYERS,
    TinyModel,
    add_tokenizer,
    tiny_model,
    train_tokenizer,
    write,
    write_gguf,
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> TinyModel:
    return tiny_model(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def recurrent(tmp_path_factory) -> Path:
    """A tiny Mamba with random weights: its state cannot be cut at a position."""
    import gguf

    inner, state, rank, kernel = 2 * HIDDEN, 8, 4, 4
    tokenizer = train_tokenizer()
    path = tmp_path_factory.mktemp("gguf") / "mamba.gguf"
    random = np.random.default_rng(1)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(LAYERS)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokenizer(writer, tokenizer)
    writer.add_tensor("token_embd.weight", matrix(tokenizer.get_vocab_size(), HIDDEN) * 4)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for name, array in {
            "attn_norm.weight": np.ones(HIDDEN, np.float32),
            "ssm_in.weight": matrix(2 * inner, HIDDEN),
            "ssm_conv1d.weight": matrix(inner, kernel),
            "ssm_conv1d.bias": np.zeros(inner, np.float32),
            "ssm_x.weight": matrix(rank + 2 * state, inner),
            "ssm_dt.weight": matrix(inner, rank),
            "ssm_dt.bias": np.zeros(inner, np.float32),
            "ssm_a": -np.exp(matrix(inner, state)),
            "ssm_d": np.ones(inner, np.float32),
            "ssm_out.weight": matrix(HIDDEN, inner),
        }.items():
            writer.add_tensor(f"blk.{layer}.{name}", array)
    write(writer)
    return path


@pytest.fixture(scope="session")
def lora(tmp_path_factory, tiny) -> tuple[Path, Path]:
    """A LoRA adapter of rank 4 for the tiny model's first values, and the tiny model with it merged at scale 0.5."""
    import gguf

    random, rank, alpha, name = np.random.default_rng(2), 4, 8.0, "model.layers.0.self_attn.v_proj.weight"
    folder = tmp_path_factory.mktemp("lora")
    rows, columns = tiny.weights[name].shape
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((rank, columns), (rows, rank)))
    writer = gguf.GGUFWriter(folder / "adapter.gguf", "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    writer.add_tensor("blk.0.attn_v.weight.lora_a", a)
    writer.add_tensor("blk.0.attn_v.weight.lora_b", b)
    write(writer)
    merged = tiny.weights | {name: tiny.weights[name] + 0.5 * alpha / rank * b @ a}
    write_gguf(folder / "merged.gguf", merged, tiny.tokenizer)
    return folder / "adapter.gguf", folder / "merged.gguf"
