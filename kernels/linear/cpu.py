"""Linear layers in C for CPUs, with weights that are packed once.

A single row is bound by memory, many rows by the vector units. A row's result has the same bits in every batch. The
loop order follows Goto & van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication".
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from ...protocol.errors import ConfigurationError
from ..runtime.native_library import call_fields, load, loaded

#: Bytes of a cache line.
LINE = 64
_PANELS_AT_ONCE = 64
#: Rows at a stride of a multiple of this many bytes share few lines of the level-1 cache, and evict each other.
CROWDED = 2048


class CWeights(ctypes.Structure):
    """The C struct `Weights` of native/calls.h. Its `format` is 0 for plain weights."""

    _fields_ = call_fields(
        "packed bias scale zero minimum scale_factor minimum_factor",
        "outputs inputs is_bf16 format groups has_halves factor_groups",
    )


class _LinearCall(ctypes.Structure):
    """The C struct `LinearCall` of native/calls.h."""

    _fields_ = call_fields("weights inputs outputs", "rows stride num_threads")


class NativeLinear(nn.Module):
    """Computes `linear` for inference; its weights must pass `can_pack`. `shape` is (out_features, in_features).

    `take_over`: packed weights overwrite the plain ones if they fit, which avoids a copy.
    """

    def __init__(self, linear: nn.Linear, *, take_over: bool = False) -> None:
        super().__init__()
        library = loaded()
        weight = linear.weight.detach()
        self.shape = tuple(weight.shape)
        self.dtype = weight.dtype
        panel: int = library.linear_panel()
        in_place = take_over and weight.is_contiguous() and self.shape[0] % panel == 0
        shape = -(-self.shape[0] // panel), self.shape[1], panel
        self.weight = weight.view(shape) if in_place else weight.new_zeros(shape)
        self._bias = None if linear.bias is None else linear.bias.detach().to(self.dtype).contiguous()
        self._use(CWeights())
        plain = weight if weight.stride(1) == 1 else weight.contiguous()
        if not in_place:
            _pack(plain, self.weight)
            return
        for rows, panels in zip(plain.split(_PANELS_AT_ONCE * panel), self.weight.split(_PANELS_AT_ONCE), strict=True):
            _pack(rows.clone(), panels)

    def _use(self, weights: CWeights) -> None:
        """Let C read this layer's tensors through `weights`, and set the fields that all formats share."""
        weights.packed = self.weight.data_ptr()
        weights.bias = None if self._bias is None else self._bias.data_ptr()
        weights.outputs, weights.inputs = self.shape
        weights.is_bf16 = self.dtype == torch.bfloat16
        self._weights = weights
        self.address = ctypes.addressof(weights)  # passed to C; valid while this layer exists
        self._multiply = loaded().linear

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (rows, in_features) to (rows, out_features), in the dtype of the weights.

        Raises ConfigurationError for another shape or dtype.
        """
        if hidden.dim() != 2 or hidden.shape[1] != self.shape[1] or hidden.dtype != self.dtype:
            raise ConfigurationError(
                f"A packed layer takes input (rows, {self.shape[1]}) in {self.dtype}, got {tuple(hidden.shape)} in "
                f"{hidden.dtype}."
            )
        rows = hidden.shape[0]
        if hidden.stride(1) != 1 or (rows > 1 and hidden.stride(0) * hidden.element_size() % CROWDED == 0):
            padded = hidden.new_empty((rows, self.shape[1] + LINE // hidden.element_size()))
            hidden = padded[:, : self.shape[1]].copy_(hidden)
        out = hidden.new_empty((rows, self.shape[0]))
        call = _LinearCall(
            self.address, hidden.data_ptr(), out.data_ptr(), rows, hidden.stride(0), torch.get_num_threads()
        )
        self._multiply(ctypes.byref(call))
        return out


class NativeEmbedding(nn.Module):
    """Embeddings that are looked up in a packed layer: in a tied head, so that only one copy exists, or quantized."""

    def __init__(self, head: NativeLinear) -> None:
        super().__init__()
        self.weight = head.weight  # packed, so that callers can use only its dtype and device
        self.head, self._rows = head, loaded().linear_rows

    def forward(self, token_ids: Tensor) -> Tensor:
        """Map (tokens,) int64 to (tokens, in_features).

        Raises IndexError for an id of out_features or more, and ConfigurationError for other tensors.
        """
        if token_ids.dim() != 1 or token_ids.dtype != torch.int64 or token_ids.is_cuda:
            raise ConfigurationError(f"Token ids must be 1-D int64, got {tuple(token_ids.shape)} {token_ids.dtype}.")
        out = torch.empty(len(token_ids), self.head.shape[1], dtype=self.head.dtype)
        token_ids = token_ids.contiguous()
        if self._rows(
            ctypes.c_void_p(self.head.address),
            ctypes.c_void_p(token_ids.data_ptr()),
            ctypes.c_int64(len(token_ids)),
            ctypes.c_void_p(out.data_ptr()),
        ):
            raise IndexError(f"Token ids must be below {self.head.shape[0]}.")
        return out


def can_pack(weight: Tensor) -> bool:
    """Return whether `NativeLinear` supports a layer with `weight` (out_features, in_features)."""
    if weight.device.type != "cpu" or weight.shape[1] == 0 or load() is None:
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0)


def is_vectorised_for(dtype: torch.dtype) -> bool:
    """Return whether this processor has the vector instructions of the kernel. The weights must pass `can_pack`."""
    return bool(loaded().linear_is_vectorised(ctypes.c_int64(dtype == torch.bfloat16)))


def _pack(plain: Tensor, packed: Tensor) -> None:
    """Rearrange (outputs, inputs) into panels, (panels, inputs, outputs of a panel)."""
    weights = CWeights(outputs=plain.shape[0], inputs=plain.shape[1], is_bf16=plain.dtype == torch.bfloat16)
    call_pack(loaded().linear_pack, plain, plain.stride(0), packed, weights)


def call_pack(function: Any, numbers: Tensor, stride: int, packed: Tensor, weights: CWeights) -> None:
    """Call a C function that rearranges `numbers` into panels."""
    function(
        ctypes.c_void_p(numbers.data_ptr()),
        ctypes.c_int64(stride),
        ctypes.c_void_p(packed.data_ptr()),
        ctypes.byref(weights),
        ctypes.c_int64(torch.get_num_threads()),
    )
