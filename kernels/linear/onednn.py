"""Linear layers for CPUs by oneDNN, with weights that are reordered once instead of in every call.

On few rows, this is two to five times faster than `nn.Linear`, which reorders in every call.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Up to this many inputs, oneDNN's sums do not depend on the number of rows (observed; from 1152 on, they do).
_INVARIANT_LENGTH = 1024
#: Minimum efficient rows: with fewer, oneDNN reads the weights at three quarters of the speed.
MIN_ROWS = 4


class OneDnnLinear(nn.Module):
    """Computes `linear`, for inference only. `shape` is (out_features, in_features).

    `batch_invariant`: a row's result is identical to the last bit for any number of rows, because long sums are
    split into pieces of a fixed length, which are added in float32.
    """

    def __init__(self, linear: nn.Linear, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.shape = tuple(linear.weight.shape)
        self.dtype = linear.weight.dtype
        self.is_invariant = batch_invariant or linear.in_features <= _INVARIANT_LENGTH
        length = _INVARIANT_LENGTH if batch_invariant else linear.in_features
        self._pieces = [_packed(piece.contiguous()) for piece in linear.weight.detach().split(length, dim=1)]
        self._length = length
        self._bias = linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (rows, in_features) to (rows, out_features), in the dtype of the weights."""
        rows = hidden.shape[0]
        if rows < MIN_ROWS:
            return self._product(functional.pad(hidden, (0, 0, 0, MIN_ROWS - rows)))[:rows]
        return self._product(hidden)

    def _product(self, hidden: Tensor) -> Tensor:
        if len(self._pieces) == 1:
            return _multiply(hidden, self._pieces[0], self._bias)
        parts = hidden.split(self._length, dim=1)
        total = _multiply(parts[0], self._pieces[0], self._bias).float()
        for part, piece in zip(parts[1:], self._pieces[1:], strict=True):
            total += _multiply(part, piece, None)
        return total.to(hidden.dtype)


def can_pack(weight: Tensor) -> bool:
    """Return whether oneDNN can pack `weight`."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def _multiply(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
