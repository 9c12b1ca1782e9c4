"""All layers of a decoder in one call of C, for CPUs: what the layers' own kernels compute, to the last bit.

Between two kernels of a step Python takes as long as a kernel does where the model is small, and where it is large the
weights that stream through the caches have thrown Python out of them each time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..activation.types import Activation
from ..attention.cpu import AttentionCall, HeadsCall, NativeAttention
from ..kv_cache.types import Rotation
from ..linear.cpu import NativeLinear
from ..runtime.native_library import LANES, load


class _Layer(ctypes.Structure):
    """`Layer` of native/calls.h, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "query_norm", "key_norm", "attention_out_norm")),
        *((name, ctypes.c_void_p) for name in ("mlp_norm", "mlp_out_norm")),
        *((name, ctypes.c_int64) for name in ("window", "rotation")),
        ("scale", ctypes.c_double),
    )


class _Angles(ctypes.Structure):
    """`Angles` of native/calls.h, field for field."""

    _fields_ = (("cosine", ctypes.c_void_p), ("sine", ctypes.c_void_p), ("pairs", ctypes.c_int64))


class DecoderCall(ctypes.Structure):
    """`DecoderCall` of native/calls.h, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "final_norm", "head")),
        *((name, ctypes.c_void_p) for name in ("residual", "out", "logits", "scratch")),
        ("heads", ctypes.POINTER(HeadsCall)),
        ("attention", ctypes.POINTER(AttentionCall)),
        ("angles", _Angles * 2),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("num_layers", "rows", "padding", "size", "layer_bytes", "unit_offset", "is_gelu", "num_threads"),
                "is_bf16",
            )
        ),
        ("eps", ctypes.c_double),
    )


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: packed weights, and the weights of its norms, None where the family has none.

    `rotation`: which of the pass's rotations is its own, 0 or 1. `window`, `scale`: as in `LayerAttention`.
    """

    qkv: NativeLinear
    output: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear
    input_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    window: int | None = None
    rotation: int = 0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All layers of a decoder and the norm behind them; `eps` and `unit_offset` (`Norm`) are those of all norms."""

    layers: Sequence[LayerWeights]
    final_norm: Tensor
    eps: float
    unit_offset: bool
    activation: Activation

    @property
    def fit(self) -> bool:
        """Whether C takes them: one dtype, shapes that follow from each other, rows that fill whole vectors."""
        size, dtype = len(self.final_norm), self.final_norm.dtype
        norms = [norm for layer in self.layers for norm in _norms(layer) if norm is not None]
        return (
            len(self.layers) > 0
            and size % LANES == 0
            and all(norm.dtype == dtype and norm.is_contiguous() for norm in norms)
            and all(linear.dtype == dtype for layer in self.layers for linear in _linears(layer))
            and all(layer.qkv.shape[1] == layer.gate_up.shape[1] == size for layer in self.layers)
            and all(layer.output.shape[0] == layer.down.shape[0] == size for layer in self.layers)
            and all(layer.gate_up.shape[0] == 2 * layer.down.shape[1] for layer in self.layers)
        )


class NativeDecoder:
    """Runs the layers of `weights`, which `fit`. They are read where they lie: nothing may replace or move them."""

    def __init__(self, weights: DecoderWeights) -> None:
        library = load()
        assert library is not None, "there are packed weights"
        self._library = library
        library.decoder_scratch.restype = ctypes.c_int64
        self._weights = weights  # and keeps alive what the structures point to
        self._size, self._dtype = len(weights.final_norm), weights.final_norm.dtype
        self._widths = {(layer.qkv.shape[0], layer.output.shape[1]) for layer in weights.layers}
        self._layers = (_Layer * len(weights.layers))(*map(_layer, weights.layers))

    def run(self, hidden: Tensor, rotations: tuple[Rotation, Rotation], attention: NativeAttention) -> Tensor:
        """The last hidden states after the final norm, (rows, size), of the embeddings `hidden` (rows, size), which
        are overwritten. Raises ConfigurationError for what does not fit."""
        self.check(hidden, len(hidden), rotations, attention)
        out = torch.empty_like(hidden)
        call = self.call(hidden, out, rotations, attention)
        scratch = self.scratch(call)
        call.scratch, call.padding = scratch.data_ptr(), len(hidden) - attention.num_rows
        if self._library.decoder(ctypes.byref(call)):
            raise RuntimeError("the C kernel of attention does not take this cache")
        return out

    def call(
        self, hidden: Tensor, out: Tensor, rotations: tuple[Rotation, Rotation], attention: NativeAttention
    ) -> DecoderCall:
        """Of a pass without padding, as yet without scratch memory. Points into all of these, which must outlive it."""
        return DecoderCall(
            layers=ctypes.addressof(self._layers),
            final_norm=self._weights.final_norm.data_ptr(),
            residual=hidden.data_ptr(),
            out=out.data_ptr(),
            heads=ctypes.pointer(attention.heads_call),
            attention=ctypes.pointer(attention.attention_call),
            angles=(_Angles * 2)(*(_angles(rotation) for rotation in rotations)),
            num_layers=len(self._layers),
            rows=len(hidden),
            size=self._size,
            layer_bytes=attention.layer_bytes,
            unit_offset=self._weights.unit_offset,
            is_gelu=self._weights.activation == "gelu_tanh",
            num_threads=torch.get_num_threads(),
            is_bf16=self._dtype == torch.bfloat16,
            eps=self._weights.eps,
        )

    def scratch(self, call: DecoderCall) -> Tensor:
        """As much as `call` needs."""
        return torch.empty(self._library.decoder_scratch(ctypes.byref(call)), dtype=torch.uint8)

    def check(
        self, hidden: Tensor, rows: int, rotations: tuple[Rotation, Rotation], attention: NativeAttention
    ) -> None:
        """Raises ConfigurationError for what does not fit, past the end of which C would read and write. `rows`: of the
        batch."""
        if hidden.shape[1:] != (self._size,) or hidden.dtype != self._dtype or not hidden.is_contiguous():
            raise ConfigurationError(
                f"Decoder: dense rows of {self._size} {self._dtype} are needed, got {tuple(hidden.shape)} "
                f"{hidden.dtype}."
            )
        if len(self._layers) != attention.num_layers or any(widths != attention.widths for widths in self._widths):
            raise ConfigurationError("Decoder: the cache belongs to a model of another shape.")
        if hidden.dtype != attention.dtype:
            raise ConfigurationError(f"Decoder: the cache is in {attention.dtype}, the model in {hidden.dtype}.")
        for rotation in rotations:
            attention.check_rotation(rotation, rows)


def _norms(layer: LayerWeights) -> tuple[Tensor | None, ...]:
    return (
        *(layer.input_norm, layer.query_norm, layer.key_norm, layer.attention_out_norm),
        *(layer.mlp_norm, layer.mlp_out_norm),
    )


def _linears(layer: LayerWeights) -> tuple[NativeLinear, ...]:
    return layer.qkv, layer.output, layer.gate_up, layer.down


def _layer(layer: LayerWeights) -> _Layer:
    return _Layer(
        *(linear.address for linear in _linears(layer)),
        *(None if norm is None else norm.data_ptr() for norm in _norms(layer)),
        layer.window or 0,
        layer.rotation,
        layer.scale,
    )


def _angles(rotation: Rotation) -> _Angles:
    return _Angles(rotation.cosine.data_ptr(), rotation.sine.data_ptr(), rotation.pairs)
