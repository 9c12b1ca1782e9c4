"""GGUF files to measure: random weights in the shape of a real model, without a download.

Speed and memory do not depend on the values of the weights. Q8_0 is generated directly in the file's layout; llama.cpp
quantizes it to Q4_K_M with its usual mix of types for models of this shape.
"""

from __future__ import annotations

import ctypes
import itertools
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from ...local_engine.llama.library import llama
from ...protocol.errors import ModelLoadError

_BLOCK = 32  # number of Q8_0 values that share a scale
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Qwen2 family with tied embeddings. `kv`: number of key-value heads; heads have 64 dimensions."""

    layers: int = 24
    width: int = 896
    kv: int = 2
    feed_forward: int = 4864
    vocabulary: int = 151_936
    context: int = 32_768


QWEN_05B = Shape()


def q8_0(path: Path, shape: Shape = QWEN_05B) -> Path:
    """Write the model with random Q8_0 weights, unless the file exists."""
    if path.exists():
        return path
    unfinished = path.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, "qwen2")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.width // 64)
    writer.add_head_count_kv(shape.kv)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    _add_vocabulary(writer, shape.vocabulary)
    draw = np.random.default_rng(0)
    for name, size in _tensors(shape):
        if name.endswith(".weight") and len(size) == 2:
            writer.add_tensor(name, _random_q8_0(draw, *size), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, np.full(size, name.endswith(".weight"), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(path)


def q4_k_m(path: Path, source: Path, threads: int) -> Path:
    """Quantize `source`, a Q8_0 file, to Q4_K_M, unless the file exists. Raises ModelLoadError."""
    if path.exists():
        return path
    library = llama()
    library.last_errors()
    params = library.api.llama_model_quantize_default_params()
    params.ftype, params.nthread = library.api.LLAMA_FTYPE_MOSTLY_Q4_K_M, threads
    params.allow_requantize = True
    unfinished = path.with_suffix(".part")
    code = library.api.llama_model_quantize(str(source).encode(), str(unfinished).encode(), ctypes.byref(params))
    if code != 0:
        raise ModelLoadError(f"llama.cpp cannot quantize {source}: {library.last_errors()}.")
    return unfinished.rename(path)


def _random_q8_0(draw: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Return a matrix in the file's layout: blocks of a half-precision scale and 32 signed bytes.

    The bytes are uniform, and the scale gives weights a variance of 1 / `columns`, so that activations keep their size.
    """
    scale = np.float16(1 / (np.sqrt(256**2 / 12) * np.sqrt(columns)))
    blocks = draw.integers(0, 256, (rows, columns // _BLOCK, 2 + _BLOCK), np.uint8)
    blocks[:, :, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Add a byte-level BPE of `size` tokens: the 256 bytes, words of two, three and four letters, and three control
    tokens at the end. A digit is always one token, so that digits make prompts of known length."""
    words = list(itertools.islice(_words(), size - 256 - len(_SPECIAL)))
    tokens = [*_byte_letters(), *(left + right for left, right in words), *_SPECIAL]
    if len(tokens) != size:
        raise ValueError(f"The vocabulary has only {len(tokens)} tokens, not {size}: choose a smaller size.")
    kinds = [gguf.TokenType.NORMAL] * (size - len(_SPECIAL)) + [gguf.TokenType.CONTROL] * len(_SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{left} {right}" for left, right in words])
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)


def _byte_letters() -> list[str]:
    """Return each byte's character in byte-level BPE (Radford et al. 2019): itself if printable, else from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [*map(chr, printable), *(chr(256 + number) for number in range(256 - len(printable)))]


def _words() -> Iterator[tuple[str, str]]:
    """Yield the BPE merges that make words of two letters, then of three (a pair and a letter), then of two pairs."""
    letters = string.ascii_lowercase
    pairs = ["".join(pair) for pair in itertools.product(letters, letters)]
    for lefts, rights in ((letters, letters), (pairs, letters), (pairs, pairs)):
        yield from itertools.product(lefts, rights)


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the model's tensors, slowest dimension first."""
    width, groups = shape.width, shape.kv * 64
    yield "token_embd.weight", (shape.vocabulary, width)
    yield "output_norm.weight", (width,)
    for layer in range(shape.layers):
        for name, size in (
            ("attn_norm.weight", (width,)),
            ("attn_q.weight", (width, width)),
            ("attn_q.bias", (width,)),
            ("attn_k.weight", (groups, width)),
            ("attn_k.bias", (groups,)),
            ("attn_v.weight", (groups, width)),
            ("attn_v.bias", (groups,)),
            ("attn_output.weight", (width, width)),
            ("ffn_norm.weight", (width,)),
            ("ffn_gate.weight", (shape.feed_forward, width)),
            ("ffn_up.weight", (shape.feed_forward, width)),
            ("ffn_down.weight", (width, shape.feed_forward)),
        ):
            yield f"blk.{layer}.{name}", size
