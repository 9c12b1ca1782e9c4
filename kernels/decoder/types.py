"""Weights of a decoder, for the C code that computes all its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..activation.types import Activation
from ..linear.cpu import NativeLinear
from ..runtime.native_library import LANES


@dataclass(frozen=True, slots=True)
class LayerWeights:
    # Packed linear layers.
    qkv: NativeLinear
    output: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear
    # Weights of the norms; None if the model family lacks the norm.
    input_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    # Sliding window, as in `LayerAttention`.
    window: int | None = None
    # Index of the rotation that this layer uses, 0 or 1.
    rotation: int = 0
    # Factor by which query-key products are multiplied, as in `LayerAttention`.
    scale: float = 1.0

    @property
    def linears(self) -> tuple[NativeLinear, ...]:
        """The linear layers, in the order of the C structure."""
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def norms(self) -> tuple[Tensor | None, ...]:
        """The norms, in the order of the C structure."""
        return (
            *(self.input_norm, self.query_norm, self.key_norm, self.attention_out_norm),
            *(self.mlp_norm, self.mlp_out_norm),
        )


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All layers of a decoder and its final norm."""

    layers: Sequence[LayerWeights]
    final_norm: Tensor
    # Parameters of all norms, as in `Norm`.
    eps: float
    unit_offset: bool
    activation: Activation

    @property
    def is_supported(self) -> bool:
        """Return whether C supports the weights: one dtype, matching shapes, rows that fill whole vectors."""
        size, dtype = len(self.final_norm), self.final_norm.dtype
        norms = [norm for layer in self.layers for norm in layer.norms if norm is not None]
        return (
            len(self.layers) > 0
            and size % LANES == 0
            and all(norm.dtype == dtype and norm.is_contiguous() for norm in norms)
            and all(linear.dtype == dtype for layer in self.layers for linear in layer.linears)
            and all(layer.qkv.shape[1] == layer.gate_up.shape[1] == size for layer in self.layers)
            and all(layer.output.shape[0] == layer.down.shape[0] == size for layer in self.layers)
            and all(layer.gate_up.shape[0] == 2 * layer.down.shape[1] for layer in self.layers)
        )
