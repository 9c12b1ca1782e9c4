"""A tiny Llama with random weights and a trained byte-level tokenizer, as a GGUF file and as arrays."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

HIDDEN, LAYERS, HEADS, KV_HEADS, FEED_FORWARD, CONTEXT = 64, 2, 4, 2, 96, 256
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """A model file with its weights and tokenizer. `weights`: float32 arrays by Hugging Face name."""

    gguf: Path
    weights: dict[str, np.ndarray]
    tokenizer: tokenizers.Tokenizer


def tiny_model(path: Path) -> TinyModel:
    """Create the model, and write it to `path`."""
    tokenizer = train_tokenizer()
    weights = random_weights(tokenizer.get_vocab_size())
    write_gguf(path, weights, tokenizer)
    return TinyModel(path, weights, tokenizer)


def train_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["The user asks what the assistant knows, and the assistant answers that it does not know.\n\n"]
    tokenizer.train_from_iterator(text * 20, trainer)
    return tokenizer


def random_weights(vocab_size: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    head_size = HIDDEN // HEADS
    weights = {"model.embed_tokens.weight": matrix(vocab_size, HIDDEN) * 4}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * head_size, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * head_size, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
            "mlp.up_proj": (FEED_FORWARD, HIDDEN),
            "mlp.down_proj": (HIDDEN, FEED_FORWARD),
        }
        for name, (rows, columns) in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = 1 + 0.1 * matrix(1, HIDDEN)[0]
    weights["model.norm.weight"] = 1 + 0.1 * matrix(1, HIDDEN)[0]
    return weights


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, *inner, _ = name.split(".")
    return f"blk.{layer}.{GGUF_NAMES['.'.join(inner)]}.weight"


def interleave_rope(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a query or key weight from Hugging Face's convention to llama.cpp's.

    Hugging Face rotates the two halves of a head; llama.cpp's Llama rotates pairs of adjacent values.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: Path, weights: dict[str, np.ndarray], tokenizer: tokenizers.Tokenizer) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    add_tokenizer(writer, tokenizer)
    for name, weight in weights.items():
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        stored = weight if heads is None else interleave_rope(weight, heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored))
    write(writer)


def add_tokenizer(writer: Any, tokenizer: tokenizers.Tokenizer) -> None:
    import gguf

    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocabulary])
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token, _ in vocabulary]
    writer.add_token_types(kinds)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
    writer.add_bos_token_id(tokenizer.token_to_id("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
    writer.add_float32("general.sampling.temp", 0.0)


def write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
