"""Choice of the attention implementation for a model and device, made once, with a reason for the operator's log."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...protocol.errors import ConfigurationError
from ..runtime.backend import AttentionChoice, BackendName, has_triton
from ..runtime.numeric import FP8_CAPABILITY
from .cpu import NativeAttention, why_not_native
from .launch import AttentionShape
from .metadata import AttentionMetadata, AttentionPlanner
from .ragged_batch import RaggedBatch
from .torch_attention import TorchAttention
from .types import Attention, CacheSpec


class TorchBackend:
    """Attention in plain torch, on any device. `begin` returns the attention of one forward pass."""

    name: BackendName = "torch"

    def __init__(self, spec: CacheSpec, *, batch_invariant: bool = False) -> None:
        self.cache = spec.empty(2 * spec.kv_heads, spec.block_size, spec.head_dim)
        self._group_size = spec.heads // spec.kv_heads
        self._batch_invariant = batch_invariant

    def begin(self, batch: RaggedBatch) -> Attention:
        return TorchAttention(self.cache, batch, group_size=self._group_size, batch_invariant=self._batch_invariant)


class NativeBackend:
    """Attention in C, on CPUs."""

    name: BackendName = "native"

    def __init__(self, spec: CacheSpec) -> None:
        self.cache = spec.empty(2 * spec.kv_heads, spec.block_size, spec.head_dim)
        self._group_size = spec.heads // spec.kv_heads

    def begin(self, batch: RaggedBatch) -> Attention:
        return NativeAttention(self.cache, batch, group_size=self._group_size)


class TritonBackend:
    """Attention in Triton, on CUDA devices."""

    name: BackendName = "triton"

    def __init__(self, spec: CacheSpec) -> None:
        self.cache = spec.empty(spec.block_size, 2 * spec.kv_heads, spec.head_dim)
        self.shape = AttentionShape(
            spec.heads, spec.kv_heads, spec.head_dim, spec.block_size, self.cache.element_size(), spec.windowed
        )
        self.planner = AttentionPlanner.on(spec.device, self.shape)

    def begin(self, batch: RaggedBatch) -> Attention:
        return self.attention(self.planner.of_batch(batch))

    def attention(self, metadata: AttentionMetadata) -> Attention:
        """Return the attention of a planned pass. For a CUDA graph, fill `metadata` before every replay."""
        from .triton_attention import TritonAttention

        return TritonAttention(self.cache, metadata, self.shape)


#: Attention implementations. Each owns a KV cache (layers, blocks, ...) in its own layout.
AttentionBackend = TorchBackend | NativeBackend | TritonBackend


def choose_backend(
    spec: CacheSpec, choice: AttentionChoice = "auto", *, batch_invariant: bool = False
) -> tuple[AttentionBackend, str]:
    """Return a backend for `spec` (the fastest, or the one named by `choice`) and the reason for the choice.

    Raises ConfigurationError if the named backend cannot serve `spec`.
    """
    best: BackendName = "triton" if spec.device.type == "cuda" else "native"
    name = best if choice == "auto" else choice
    problem = _WHY_NOT[name](spec)
    if problem is None:
        why = "requested" if choice != "auto" else f"the fastest backend on {spec.device.type}"
        return _make(name, spec, batch_invariant), why
    if choice == "auto":
        return TorchBackend(spec, batch_invariant=batch_invariant), f"{name} cannot be used: {problem}"
    raise ConfigurationError(f"attention_backend={choice!r} cannot be used: {problem}.", param="attention_backend")


def _make(name: BackendName, spec: CacheSpec, batch_invariant: bool) -> AttentionBackend:
    if name == "torch":
        return TorchBackend(spec, batch_invariant=batch_invariant)
    return NativeBackend(spec) if name == "native" else TritonBackend(spec)


def _why_not_triton(spec: CacheSpec) -> str | None:
    if spec.device.type != "cuda":
        return f"the model is on {spec.device.type}, not on a CUDA device"
    if not has_triton():
        return "triton is not installed"
    if spec.dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(spec.device) < FP8_CAPABILITY:
        return "only GPUs of compute capability 8.9 and higher convert FP8"
    try:
        AttentionShape(spec.heads, spec.kv_heads, spec.head_dim, spec.block_size, cache_bytes=spec.dtype.itemsize)
    except ConfigurationError as error:
        return str(error)
    return None


_WHY_NOT: Mapping[BackendName, Callable[[CacheSpec], str | None]] = {
    "torch": lambda _: None,
    "native": lambda spec: why_not_native(spec.device, spec.dtype, spec.block_size, spec.head_dim),
    "triton": _why_not_triton,
}
