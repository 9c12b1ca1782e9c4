"""All layers of a decoder in one call of C, for CPUs, with results identical to those of the layers' own kernels.

One call saves Python's time between kernels. In a small model, that time is as long as a kernel's. In a large model, it
is even longer, because the weights evict Python's data from the caches.
"""

from __future__ import annotations

import ctypes
from typing import get_args

import torch
from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..activation.types import Activation
from ..attention.cpu import AttentionCall, HeadsCall, NativeAttention
from ..kv_cache.types import Rotation
from ..runtime.native_library import call_fields, loaded
from .types import DecoderWeights, LayerWeights


class _Layer(ctypes.Structure):
    """The C struct `Layer` of native/calls.h."""

    _fields_ = call_fields(
        "qkv output gate_up down input_norm query_norm key_norm attention_out_norm mlp_norm mlp_out_norm",
        "window rotation",
        "scale",
    )


class _Angles(ctypes.Structure):
    """The C struct `Angles` of native/calls.h."""

    _fields_ = call_fields("cosine sine", "pairs")


class DecoderCall(ctypes.Structure):
    """The C struct `DecoderCall` of native/calls.h."""

    _fields_ = (
        *call_fields("layers final_norm head residual out logits scratch"),
        ("heads", ctypes.POINTER(HeadsCall)),
        ("attention", ctypes.POINTER(AttentionCall)),
        ("angles", _Angles * 2),
        *call_fields(
            integers="num_layers rows padding size layer_bytes unit_offset activation num_threads is_bf16",
            doubles="eps",
        ),
    )


class NativeDecoder:
    """Runs the layers of `weights`, which must be supported. C keeps pointers to the weights, so they must not move."""

    def __init__(self, weights: DecoderWeights) -> None:
        self._library = loaded()
        self._library.decoder_scratch.restype = ctypes.c_int64
        self._weights = weights  # also keeps alive the tensors that the structures point to
        self._size, self._dtype = len(weights.final_norm), weights.final_norm.dtype
        self._widths = {(layer.qkv.shape[0], layer.output.shape[1]) for layer in weights.layers}
        self._layers = (_Layer * len(weights.layers))(*map(_layer, weights.layers))

    def run(self, hidden: Tensor, rotations: tuple[Rotation, Rotation], attention: NativeAttention) -> Tensor:
        """Return the hidden states after the final norm, (rows, size), for the embeddings `hidden` (rows, size).

        Overwrites `hidden`. Raises ConfigurationError for tensors that do not fit.
        """
        self.check(hidden, len(hidden), rotations, attention)
        out = torch.empty_like(hidden)
        call = self.call(hidden, out, rotations, attention)
        scratch = self.scratch(call)
        call.scratch, call.padding = scratch.data_ptr(), len(hidden) - attention.num_rows
        if self._library.decoder(ctypes.byref(call)):
            raise RuntimeError("the C attention kernel does not support this cache")
        return out

    def call(
        self, hidden: Tensor, out: Tensor, rotations: tuple[Rotation, Rotation], attention: NativeAttention
    ) -> DecoderCall:
        """Return the C structure of a forward pass, without `padding` and `scratch`. The arguments must outlive it."""
        return DecoderCall(
            layers=ctypes.addressof(self._layers),
            final_norm=self._weights.final_norm.data_ptr(),
            residual=hidden.data_ptr(),
            out=out.data_ptr(),
            heads=ctypes.pointer(attention.heads_call),
            attention=ctypes.pointer(attention.attention_call),
            angles=(_Angles * 2)(
                *(
                    _Angles(rotation.cosine.data_ptr(), rotation.sine.data_ptr(), rotation.pairs)
                    for rotation in rotations
                )
            ),
            num_layers=len(self._layers),
            rows=len(hidden),
            size=self._size,
            layer_bytes=attention.layer_bytes,
            unit_offset=self._weights.unit_offset,
            activation=get_args(Activation).index(self._weights.activation),
            num_threads=torch.get_num_threads(),
            is_bf16=self._dtype == torch.bfloat16,
            eps=self._weights.eps,
        )

    def scratch(self, call: DecoderCall) -> Tensor:
        """Return the scratch memory that `call` needs."""
        return torch.empty(self._library.decoder_scratch(ctypes.byref(call)), dtype=torch.uint8)

    def check(
        self, hidden: Tensor, rows: int, rotations: tuple[Rotation, Rotation], attention: NativeAttention
    ) -> None:
        """Raise ConfigurationError for tensors that C would access past the end. `rows`: rows in the batch."""
        if hidden.shape[1:] != (self._size,) or hidden.dtype != self._dtype or not hidden.is_contiguous():
            raise ConfigurationError(
                f"Decoder: the input must be contiguous rows of {self._size} {self._dtype}, got {tuple(hidden.shape)} "
                f"{hidden.dtype}."
            )
        if len(self._layers) != attention.num_layers or any(widths != attention.widths for widths in self._widths):
            raise ConfigurationError("Decoder: the cache belongs to a model of another shape.")
        if hidden.dtype != attention.dtype:
            raise ConfigurationError(f"Decoder: the cache is in {attention.dtype}, the model in {hidden.dtype}.")
        for rotation in rotations:
            attention.check_rotation(rotation, rows)


def _layer(layer: LayerWeights) -> _Layer:
    return _Layer(
        *(linear.address for linear in layer.linears),
        *(None if norm is None else norm.data_ptr() for norm in layer.norms),
        layer.window or 0,
        layer.rotation,
        layer.scale,
    )
