"""Speed, memory and loading time of one model in every format of weights."""

# the gguf library is untyped
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...cloud_engine.engine.config import EngineConfig
from ...cloud_engine.models.decoder import Decoder
from ...cloud_engine.models.loading.checkpoint import SafetensorsFolder
from ...cloud_engine.models.loading.loader import family_of, load_model
from ...kernels.runtime.backend import Quantization
from ..shared.workload import WorkloadRequest
from .driving import BUDGET, make_engine, serve
from .speed import decode_speed

#: Formats by name: quantization at load, or the type of a GGUF file.
_AT_LOAD: dict[str, Quantization | None] = {"bf16": None, "fp8": "fp8", "int8": "int8", "int4": "int4"}
_GGUF = ("Q8_0", "Q4_0", "Q4_K")
_SMALLER = "Q5_0"  # llama.cpp's type for rows that are not whole blocks of Q4_K
_CONFIG = EngineConfig(max_num_seqs=8, max_num_batched_tokens=BUDGET, enable_prefix_caching=False)


def format_figures(
    folder: Path, place: Path, say: Callable[[str], None], tokens: int = 24, prompt: int = 256
) -> dict[str, float]:
    """Measure the model in `folder` in every format: tokens per second, GB in memory, loading over reading.

    The page cache is dropped before loading and before reading, on Linux. GGUF files with random numbers lie in the
    folder `place` meanwhile.
    """
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        return _figures(folder, Path(temporary), say, tokens, prompt)


def _figures(folder: Path, place: Path, say: Callable[[str], None], tokens: int, prompt: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in (*_AT_LOAD, *_GGUF):
        path = folder if name in _AT_LOAD else _random_gguf(folder, place / f"{name}.gguf", name)
        read_s = _seconds_to_read(path)
        _drop_cache(path)
        started = time.perf_counter()
        model = load_model(path, dtype=torch.bfloat16, quantization=_AT_LOAD.get(name))
        engine = make_engine(model, _CONFIG)
        load_s = time.perf_counter() - started
        speeds = [decode_speed(engine, 1, tokens) for _ in range(3)]
        prompt_s = min(serve(engine, [WorkloadRequest([seed + 1] * prompt, 1)]) for seed in range(2))
        figures |= {
            f"{name}_decode_tokens_per_s": max(speeds),
            f"{name}_prompt_tokens_per_s": prompt / prompt_s,
            f"{name}_gb": held_bytes(model) / 1e9,
            f"{name}_gb_in_file": sum(file.stat().st_size for file in _files(path)) / 1e9,
            f"{name}_load_over_read": load_s / read_s,
        }
        say(", ".join(f"{key} {value:.3g}" for key, value in figures.items() if key.startswith(name)))
        del engine, model
    return figures


def held_bytes(model: Decoder) -> int:
    """Return the bytes of a model's tensors, of which packed layers have some as plain attributes."""
    held: dict[int, int] = {}
    for module in model.modules():
        for each in (*vars(module).values(), *module.buffers(recurse=False), *module.parameters(recurse=False)):
            if isinstance(each, Tensor):
                held[each.data_ptr()] = each.nbytes
    return sum(held.values())


def _files(path: Path) -> Iterable[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _drop_cache(path: Path) -> None:
    if not hasattr(os, "posix_fadvise"):  # macOS and Windows
        return
    for file in _files(path):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds_to_read(path: Path) -> float:
    _drop_cache(path)
    buffer = bytearray(2**24)
    started = time.perf_counter()
    for file in _files(path):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - started


def _random_gguf(folder: Path, path: Path, name: str) -> Path:
    """Write a file at `path` with the metadata and shapes of the model in `folder`, and random blocks."""
    import gguf

    checkpoint = SafetensorsFolder(folder)
    config = family_of(checkpoint.fields).read_config(checkpoint.fields)
    arch = config.architecture.removesuffix("ForCausalLM").lower()
    writer: Any = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6)
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names, rng = gguf.get_tensor_name_map(kind, config.num_layers), np.random.default_rng(0)
    for tensor in sorted(checkpoint.difference(set())[1]):
        shape, full = checkpoint.shape(tensor), names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        if len(shape) == 1:
            writer.add_tensor(full, np.ones(shape, dtype=np.float32))
            continue
        own = gguf.GGMLQuantizationType[name]
        if shape[1] % gguf.GGML_QUANT_SIZES[own][0]:
            own = gguf.GGMLQuantizationType[_SMALLER]
        block, size = gguf.GGML_QUANT_SIZES[own]
        blocks = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
        blocks[..., :4] = np.array([1e-4, 1e-4], dtype=np.float16).view(np.uint8)  # scales
        writer.add_tensor(full, blocks.reshape(shape[0], -1), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
