"""GGUF models of any shape with random weights. Memory and speed do not depend on the values of the weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np


@dataclass(frozen=True)
class Shape:
    """A Llama-like decoder. `kind`: ggml type of matrices. `extra`: hyperparameters by name without "llama."."""

    architecture: str = "llama"
    layers: int = 2
    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    feed_forward: int = 512
    vocabulary: int = 1024
    context: int = 4096
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F16
    extra: dict[str, int | list[int]] = field(default_factory=dict)


def write(path: Path, shape: Shape) -> Path:
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in shape.extra.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{shape.architecture}.{name}", value)
    _add_vocabulary(writer, shape.vocabulary)
    draw = np.random.default_rng(0)
    for name, size in _tensors(shape).items():
        if len(size) == 1:
            writer.add_tensor(name, np.ones(size, np.float32))
        else:
            matrix = (draw.standard_normal(size, np.float32) / np.sqrt(size[1])).astype(np.float32)
            writer.add_tensor(name, gguf.quantize(matrix, shape.kind), raw_dtype=shape.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add the 256 bytes in GPT-2's spelling, one merge, filler tokens, and an end token."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = [chr(letter) for letter in letters] + [chr(256 + index) for index in range(256 - len(letters))]
    tokens = [*spelled, "ab", *(f"<f{index}>" for index in range(size - 258)), "<end>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (size - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def _tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return tensor shapes by name, slowest dimension first."""
    attention, groups = shape.heads * shape.head, shape.kv_heads * shape.head
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (shape.vocabulary, shape.width),
        "output_norm.weight": (shape.width,),
    }
    for layer in range(shape.layers):
        inner: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (shape.width,),
            "attn_q.weight": (attention, shape.width),
            "attn_k.weight": (groups, shape.width),
            "attn_v.weight": (groups, shape.width),
            "attn_output.weight": (shape.width, attention),
            "ffn_norm.weight": (shape.width,),
            "ffn_gate.weight": (shape.feed_forward, shape.width),
            "ffn_up.weight": (shape.feed_forward, shape.width),
            "ffn_down.weight": (shape.width, shape.feed_forward),
        }
        if shape.architecture == "qwen2":
            inner |= {"attn_q.bias": (attention,), "attn_k.bias": (groups,), "attn_v.bias": (groups,)}
        if shape.architecture == "gemma3":
            inner |= {
                "attn_q_norm.weight": (shape.head,),
                "attn_k_norm.weight": (shape.head,),
                "post_attention_norm.weight": (shape.width,),
                "post_ffw_norm.weight": (shape.width,),
            }
        shapes |= {f"blk.{layer}.{name}": size for name, size in inner.items()}
    return shapes
