"""A trained model in both formats: the same words, and those that others get from it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from updraft.cloud_engine.engine.config import EngineConfig
from updraft.cloud_engine.engine.engine import Engine
from updraft.cloud_engine.engine.types.request import GenerationRequest
from updraft.cloud_engine.engine.worker.served_model import ServedModel
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.protocol.sampling import SamplingParams

pytest.importorskip("gguf", reason="needs the [cloud] extra")
transformers = pytest.importorskip("transformers")

from gguf_writer import write_gguf

torch.set_num_threads(1)

STORIES = Path(__file__).parents[4] / "shared" / "data" / "weights" / "stories260K"
pytestmark = pytest.mark.skipif(not STORIES.is_dir(), reason="the stories260K weights are not beside this checkout")


def pieces() -> list[bytes]:
    data, offset, words = (STORIES / "tok512.bin").read_bytes(), 4, []
    while offset < len(data):
        _, length = struct.unpack_from("<fi", data, offset)
        words.append(data[offset + 8 : offset + 8 + length])
        offset += 8 + length
    return words


@pytest.fixture(scope="module")
def reference() -> Any:
    """The llama2.c file as a transformers model: rotary pairs moved from adjacent rows to halves."""
    raw = (STORIES / "stories260K.bin").read_bytes()
    dim, feed_forward, layers, heads, kv_heads, vocabulary, context = struct.unpack_from("<7i", raw)
    numbers, offset = np.frombuffer(raw, dtype="<f4", offset=28), 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal offset
        size = int(np.prod(shape))
        offset += size
        return torch.from_numpy(numbers[offset - size : offset].reshape(shape).copy())

    head_dim = dim // heads
    embed, input_norms = take(vocabulary, dim), take(layers, dim)
    q, k, v = take(layers, dim, dim), take(layers, kv_heads * head_dim, dim), take(layers, kv_heads * head_dim, dim)
    o, mlp_norms = take(layers, dim, dim), take(layers, dim)
    gate, down, up = take(layers, feed_forward, dim), take(layers, dim, feed_forward), take(layers, feed_forward, dim)
    state = {"model.embed_tokens.weight": embed, "lm_head.weight": embed, "model.norm.weight": take(dim)}
    for i in range(layers):
        q_halves, k_halves = (w[i].view(-1, head_dim // 2, 2, dim).transpose(1, 2).reshape(-1, dim) for w in (q, k))
        state |= {
            f"model.layers.{i}.{name}.weight": tensor
            for name, tensor in {
                "input_layernorm": input_norms[i],
                "self_attn.q_proj": q_halves,
                "self_attn.k_proj": k_halves,
                "self_attn.v_proj": v[i],
                "self_attn.o_proj": o[i],
                "post_attention_layernorm": mlp_norms[i],
                "mlp.gate_proj": gate[i],
                "mlp.up_proj": up[i],
                "mlp.down_proj": down[i],
            }.items()
        }
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    return model


def greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    engine = Engine(ServedModel(load_model(path)), EngineConfig())
    engine.add_request(GenerationRequest("r", prompt, SamplingParams(temperature=0.0, max_tokens=count)))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
    return tokens


def test_both_formats_tell_the_same_story(reference: Any, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path / "folder")
    write_gguf(reference, tmp_path / "model.gguf")
    vocabulary = pieces()
    prompt = [1, *(vocabulary.index(piece) for piece in (b" Once", b" upon", b" a", b" time"))]
    story = greedy(tmp_path / "folder", prompt, 200)
    assert b"".join(vocabulary[token] for token in story).startswith(b", there was a little girl named Lily.")
    assert story == greedy(tmp_path / "model.gguf", prompt, 200)
    with torch.inference_mode():
        theirs = reference.generate(torch.tensor([prompt]), max_new_tokens=200, do_sample=False)[0, len(prompt) :]
    assert story == theirs.tolist()
