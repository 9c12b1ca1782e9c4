"""GGUF files as a source of weights: metadata with the keys of a `config.json`, and plain or packed tensors.

With this module, a device's model file can be the draft model in the cloud. Updraft's own reader checks the header; the
`gguf` package maps tensor names, and dequantises types that no kernel multiplies.
"""

# the gguf library is untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....model_files.gguf_header import GgufTensor
from ....model_files.gguf_reader import read_header, read_texts
from ....protocol.errors import MissingDependencyError, ModelLoadError
from ..fields import Fields

_NUMBERS_AT_ONCE = 2**20  # maximum dequantised numbers held in memory besides the model
#: By ggml's ids of types: F32, F16 and BF16.
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

#: llama.cpp's name of an architecture -> Hugging Face's. Mistral is stored as llama.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
}
_SIZES_OF_ROPE = ("rope.dimension_count", "attention.key_length", "embedding_length", "attention.head_count")


class GgufFile:
    """A GGUF file with the interface of `SafetensorsFolder`. Raises ModelLoadError if damaged or not supported."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            message = "Reading GGUF weights needs gguf: pip install '.[cloud]' in a clone of Updraft"
            raise MissingDependencyError(message) from error
        self.where = str(path)
        self._header = read_header(path)
        self._tensors = {tensor.name: tensor for tensor in self._header.tensors}
        with path.open("rb") as file:
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch warns of read-only buffers
        self._arch = self._header.architecture
        if self._arch not in _ARCHITECTURES:
            raise ModelLoadError(
                f"{path}: architecture {self._arch!r} is not supported; supported: {', '.join(_ARCHITECTURES)}."
            )
        self.fields = Fields(self._config(), self.where)
        layers = self.fields.integer("num_hidden_layers")
        if layers > len(self._tensors):
            raise ModelLoadError(f"{path}: {layers} layers in the header, but only {len(self._tensors)} tensors.")
        arch = next(member for member, name in gguf.MODEL_ARCH_NAMES.items() if name == self._arch)
        self._names = gguf.get_tensor_name_map(arch, layers)

    def difference(self, expected: set[str]) -> tuple[set[str], set[str]]:
        by_gguf_name = {self._gguf_name(name): name for name in expected}
        missing = {name for gguf_name, name in by_gguf_name.items() if gguf_name not in self._tensors}
        return missing, self._tensors.keys() - by_gguf_name.keys() - set(_NOT_WEIGHTS)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(reversed(self._tensors[self._gguf_name(name)].shape))

    def dtype(self, name: str) -> torch.dtype:
        """Return the type that a tensor is stored in; bfloat16 for blocks."""
        return _PLAIN.get(self.kind(name), torch.bfloat16)

    def has(self, name: str) -> bool:
        return self._gguf_name(name) in self._tensors

    def kind(self, name: str) -> int:
        """Return ggml's id of a tensor's type; -1 if there is no such tensor."""
        tensor = self._tensors.get(self._gguf_name(name))
        return -1 if tensor is None else tensor.kind

    def block_type(self, name: str) -> str | None:
        """Return the name of a tensor's type; None if the type is plain or unknown."""
        import gguf

        kind = self.kind(name)
        known = {int(member): member.name for member in gguf.GGMLQuantizationType}
        return None if kind in _PLAIN else known.get(kind)

    def read(self, name: str) -> Tensor:
        """Return a copy of a tensor as it is stored, (rows, bytes) uint8."""
        return torch.cat([piece.clone() for piece in self.pieces(name)])

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield the rows of a tensor as they are stored, (some rows, bytes) uint8. The next piece overwrites them."""
        tensor = self._tensors[self._gguf_name(name)]
        rows, heads = math.prod(tensor.shape[1:]), self._adjacent_heads(name)
        unit = 1 if heads is None else rows // heads  # heads stay whole
        rows_at_once = unit * max(1, _NUMBERS_AT_ONCE // (tensor.shape[0] * unit))
        row_bytes = tensor.size // rows
        buffer = bytearray(min(rows, rows_at_once) * row_bytes)
        with Path(self.where).open("rb", buffering=0) as file:
            file.seek(self._header.data_start + tensor.start)
            for start in range(0, rows, rows_at_once):
                count = min(rows_at_once, rows - start)
                if file.readinto(memoryview(buffer)[: count * row_bytes]) != count * row_bytes:
                    raise ModelLoadError(f"{self.where}: {tensor.name} ends too early.")
                piece = torch.frombuffer(buffer, dtype=torch.uint8, count=count * row_bytes).view(count, -1)
                yield piece if heads is None else _to_halves(piece, count // unit)

    def copy_into(self, name: str, target: Tensor) -> None:
        tensor = self._tensors[self._gguf_name(name)]
        is_one_more = self._arch == "gemma3" and name.endswith("norm.weight")  # llama.cpp stores 1 + weight
        into = target.view(-1, target.shape[-1])
        rows_at_once = max(1, _NUMBERS_AT_ONCE // into.shape[1])
        for start in range(0, len(into), rows_at_once):
            numbers = self._dequantised(tensor, slice(start, start + rows_at_once))
            rows = torch.from_numpy(np.require(numbers, requirements="W"))
            into[start : start + rows_at_once].copy_(rows - 1 if is_one_more else rows)
            self._mapping.madvise(mmap.MADV_DONTNEED)  # release pages that have been read
        heads = self._adjacent_heads(name)
        if heads is not None:
            target.copy_(_to_halves(target, heads))

    def _adjacent_heads(self, name: str) -> int | None:
        """Return the number of heads in a tensor whose rotary pairs are adjacent; None for other tensors."""
        if self._arch != "llama":
            return None
        keys = {".self_attn.q_proj.": "num_attention_heads", ".self_attn.k_proj.": "num_key_value_heads"}
        return next((self.fields.integer(key) for part, key in keys.items() if part in name), None)

    def _dequantised(self, tensor: GgufTensor, rows: slice) -> Any:
        import gguf

        start = self._header.data_start + tensor.start
        try:
            kind = gguf.GGMLQuantizationType(tensor.kind)
            stored = np.frombuffer(self._mapping, np.uint8, tensor.size, start)
            return gguf.quants.dequantize(stored.reshape(math.prod(tensor.shape[1:]), -1)[rows], kind)
        except (NotImplementedError, ValueError) as error:
            raise ModelLoadError(f"{self.where}: {tensor.name} cannot be dequantised: {error}.") from error

    def _gguf_name(self, name: str) -> str:
        return self._names.get_name(name, try_suffixes=(".weight", ".bias")) or name

    def _parameter(self, key: str) -> Any:
        return self._header.hyperparameter(key)

    def _config(self) -> dict[str, Any]:
        config = {name: self._parameter(key) for name, key in _KEYS.items()}
        config["sliding_window"] = config["sliding_window"] or None  # llama.cpp's converter writes 0 for no window
        if "token_embd.weight" not in self._tensors:
            raise ModelLoadError(f"{self.where}: missing tensors: token_embd.weight.")
        return {
            **config,
            "architectures": [_ARCHITECTURES[self._arch]],
            "vocab_size": self._tensors["token_embd.weight"].shape[1],
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_output.bias" in self._tensors,
            "rope_parameters": self._rope(),
            "quantization_config": {"quant_method": "gguf"} if self._has_blocks() else {},
            **(self._gemma3(config) if self._arch == "gemma3" else {}),
        }

    def _has_blocks(self) -> bool:
        return any(tensor.kind not in _PLAIN for tensor in self._tensors.values())

    def _rope(self) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "rope_type": self._parameter("rope.scaling.type") or "default",
            "rope_theta": self._parameter("rope.freq_base"),
            "factor": self._parameter("rope.scaling.factor"),
            "original_max_position_embeddings": self._parameter("rope.scaling.original_context_length"),
            "attention_factor": self._parameter("rope.scaling.attn_factor"),
            "beta_fast": self._parameter("rope.scaling.yarn_beta_fast"),
            "beta_slow": self._parameter("rope.scaling.yarn_beta_slow"),
        }
        if parameters["rope_type"] == "none":
            parameters["rope_type"] = "default"
        sizes = Fields({key: self._parameter(key) for key in _SIZES_OF_ROPE}, self.where)
        if "rope.dimension_count" in sizes.values:
            head_dim = sizes.optional_integer("attention.key_length")
            head_dim = head_dim or sizes.integer("embedding_length") // sizes.integer("attention.head_count")
            parameters["partial_rotary_factor"] = sizes.integer("rope.dimension_count") / max(1, head_dim)
        if "rope_freqs.weight" in self._tensors:  # Llama 3's RoPE scaling, computed by the converter
            factors = self._numbers("rope_freqs.weight")
            same = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
            parameters |= {**same, "original_max_position_embeddings": self._parameter("context_length")}
        elif "rope_factors_long.weight" in self._tensors:
            parameters |= {
                "rope_type": "longrope",
                "long_factor": self._numbers("rope_factors_long.weight"),
                "short_factor": self._numbers("rope_factors_short.weight"),
            }
        return {key: value for key, value in parameters.items() if value is not None}

    def _gemma3(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings that llama.cpp hard-codes for Gemma 3. The 27B model has its own attention scale."""
        sizes = Fields(config, self.where)
        is_27b = config["num_hidden_layers"] == 62
        return {
            "query_pre_attn_scalar": sizes.integer("hidden_size") // sizes.integer("num_attention_heads")
            if is_27b
            else config["head_dim"],
            "final_logit_softcapping": self._parameter("final_logit_softcapping"),
            "rope_parameters": {"full_attention": self._rope()},
        }

    def _numbers(self, name: str) -> list[float]:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{self.where}: missing tensors: {name}.")
        return [float(number) for number in self._dequantised(tensor, slice(None)).ravel()]


def gguf_vocabulary(path: Path) -> dict[str, int] | None:
    """Return the tokens of a GGUF file with their ids, or None if it has no tokenizer. Raises ModelLoadError."""
    tokens = read_header(path).arrays.get("tokenizer.ggml.tokens")
    return None if tokens is None else {token: token_id for token_id, token in enumerate(read_texts(path, tokens))}


def _to_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head, so that rotary pairs are no longer adjacent, but half a head apart."""
    per_head = weight.shape[0] // heads
    return weight.view(heads, per_head // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
