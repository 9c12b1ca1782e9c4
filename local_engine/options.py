"""User options for on-device models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ..protocol.errors import InvalidRequestError
from .llama.context import LoraAdapter
from .machine.memory_fit import KvCacheType

#: Types of a KV cache that only flash attention can read.
QUANTIZED: tuple[KvCacheType, ...] = ("q8_0", "q4_0")
_RANGES = {  # minimum and maximum; llama.cpp aborts above 512 threads
    "max_model_len": (1, 2**31 - 1),
    "max_num_seqs": (1, 64),
    "max_waiting": (0, 2**20),
    "threads": (1, 512),
    "gpu_layers": (0, 2**16),
    "ubatch": (2, 2**14),
    "default_max_tokens": (1, 2**31 - 1),
}
_SWITCH = (bool | None, "True, False or None")
_KINDS = {
    "repack": _SWITCH,
    "flash_attention": _SWITCH,
    "prompt_logprobs": _SWITCH,
    "model_id": (str | None, "a string or None"),
    "tool_call_parser": (str, "a string"),
    "chat_template": (str | None, "a string or None"),
}


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Options of one model. An option that is None gets the value that `updraft tune` found, or else a default."""

    # Context length in tokens, prompt and answer together. None: the trained length, at most 4,096.
    max_model_len: int | None = None
    # Maximum number of answers generated at once, which share one KV cache. None: 8.
    max_num_seqs: int | None = None
    # Maximum number of requests that wait while `max_num_seqs` answers are generated.
    max_waiting: int = 256
    # Threads per step. None: one per 20 million parameters, up to the number of physical cores.
    threads: int | None = None
    # Layers to run on a GPU. None: llama.cpp decides. 0: CPU only.
    gpu_layers: int | None = None
    # Copy weights into a layout that suits the processor. None: only if Updraft's kernels do not apply.
    repack: bool | None = None
    # Tokens per step. None: 512, or 128 if Updraft's attention kernel runs a model of 100 million parameters or more.
    ubatch: int | None = None
    # Type of the KV cache: f32, f16, q8_0 or q4_0. None: f16, but f32 for models under 100 million parameters.
    kv_cache_type: KvCacheType | None = None
    # Flash attention. None: off with an f32 cache, which flash attention would round; otherwise llama.cpp decides.
    flash_attention: bool | None = None
    # Compute log-probabilities of all prompt tokens, which disables the prefix cache. None: for models under 100
    # million parameters, and on request.
    prompt_logprobs: bool | None = None
    # LoRA adapters that change the model's weights.
    adapters: tuple[LoraAdapter, ...] = ()
    # Name of the model. None: the file's name.
    model_id: str | None = None
    # Maximum tokens per answer if the request sets no `max_tokens`.
    default_max_tokens: int = 1024
    # Name of the model's tool-call format. `auto` derives the format from the chat template.
    tool_call_parser: str = "auto"
    # `chatml`, or the path of a Jinja file. None: the model file's template, else ChatML or one message per line.
    chat_template: str | None = None

    def check(self) -> None:
        """Raise InvalidRequestError for values that are invalid for every model."""
        for name, (least, most) in _RANGES.items():
            value: object = getattr(self, name)
            if value is None and name not in ("max_waiting", "default_max_tokens"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise _wrong(f"{name} must be a whole number of {least:,} to {most:,}", value)
        for name, (kind, expected) in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise _wrong(f"{name} must be {expected}", getattr(self, name))
        _check_adapters(self.adapters)
        if self.kv_cache_type not in (None, "f32", "f16", *QUANTIZED):
            raise _wrong("kv_cache_type must be f32, f16, q8_0 or q4_0", self.kv_cache_type)
        if self.kv_cache_type in QUANTIZED and self.flash_attention is False:
            raise InvalidRequestError(
                f"A KV cache of type {self.kv_cache_type} needs flash attention: do not set flash_attention to False.",
                param="flash_attention",
                code="invalid_value",
            )


def adapter_of(text: str) -> LoraAdapter:
    """Parse `file.gguf`, or `file.gguf:0.5` to apply the adapter at half strength."""
    path, colon, scale = text.rpartition(":")
    try:
        return LoraAdapter(Path(path).expanduser(), float(scale)) if colon else LoraAdapter(Path(text).expanduser())
    except ValueError:  # no number after the colon, so the colon is part of the path
        return LoraAdapter(Path(text).expanduser())


def _check_adapters(adapters: object) -> None:
    if not isinstance(adapters, tuple | list):
        raise _wrong("adapters must be a tuple of LoraAdapter", adapters)
    for adapter in cast(Sequence[object], adapters):
        if not isinstance(adapter, LoraAdapter) or not isinstance(adapter.path, str | Path):
            raise _wrong("adapters must be a tuple of LoraAdapter, each with the path of its file", adapter)
        scale: object = adapter.scale
        if not isinstance(scale, int | float) or not math.isfinite(scale):
            raise _wrong(f"adapters must be a tuple of LoraAdapter with finite scales ({adapter.path})", scale)


def _wrong(rule: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{rule}, got {value!r}.", param=rule.partition(" must ")[0], code="invalid_value")
