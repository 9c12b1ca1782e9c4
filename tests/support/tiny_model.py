"""Writes a small random model as a Hugging Face folder, as users have them."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
import transformers
from updraft.embedded.export import write_hf_folder

CONTEXT = 256


def write_model(
    folder: Path, seed: int, *, context: int = CONTEXT, padding: int = 0, width: int = 32, layers: int = 2
) -> Path:
    """Write a random Llama with one token per byte, whose answers end only at their length limit.

    `padding`: number of rows in the vocabulary without a token.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    config = transformers.LlamaConfig(
        vocab_size=library.get_vocab_size() + padding,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(2, width // 64),
        num_key_value_heads=1,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(seed)
    state = transformers.LlamaForCausalLM(config).state_dict()
    weights = {name: torch.randn_like(value) * 0.2 for name, value in state.items() if name != "lm_head.weight"}
    write_hf_folder(folder, config.to_dict(), weights, library)
    return folder
