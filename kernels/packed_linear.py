"""Linear layers for the CPU with weights in the order oneDNN computes in, rearranged once instead of in every call.

On few rows that is two to five times faster than `nn.Linear`, which finds a plain matrix in every call.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..protocol.errors import ConfigurationError

#: oneDNN splits longer sums differently for different numbers of rows (seen from 1152 on, never up to 1024).
_INVARIANT_LENGTH = 1024
#: Fewer rows than this take longer than this many: oneDNN then reads the weights at three quarters of the speed.
_LEAST_ROWS = 4
_CHECKED_ROWS = 40


class PackedLinear(nn.Module):
    """What `linear` computes, for inference only. `shape` is (out_features, in_features).

    `batch_invariant`: a row's result does not depend, to the last bit, on how many rows there are. Long sums are cut
    into pieces of a fixed length for that, which are added in float32.
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
        """(rows, in_features) to (rows, out_features), in the dtype of the weights."""
        rows = hidden.shape[0]
        if rows < _LEAST_ROWS:
            return self._product(functional.pad(hidden, (0, 0, 0, _LEAST_ROWS - rows)))[:rows]
        return self._product(hidden)

    def _product(self, hidden: Tensor) -> Tensor:
        if len(self._pieces) == 1:
            return _multiply(hidden, self._pieces[0], self._bias)
        parts = hidden.split(self._length, dim=1)
        total = _multiply(parts[0], self._pieces[0], self._bias).float()
        for part, piece in zip(parts[1:], self._pieces[1:], strict=True):
            total += _multiply(part, piece, None)
        return total.to(hidden.dtype)


def pack_linears(model: nn.Module, *, batch_invariant: bool = False) -> None:
    """Replace every `nn.Linear` of a model on the CPU, in place, where oneDNN can pack its weights.

    The plain weights go, but for those that another layer uses too (a tied head). A packed model stays as it is. Raises
    ConfigurationError if `batch_invariant` cannot be had on this machine.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear) and batch_invariant and not child.is_invariant:
                raise ConfigurationError(
                    "batch_invariant: this model has been packed without it for another engine. Load it once more.",
                    param="batch_invariant",
                )
            if isinstance(child, nn.Linear) and can_pack(child.weight):
                setattr(parent, name, PackedLinear(child, batch_invariant=batch_invariant))
    if batch_invariant:
        _check_invariance(model)


def least_rows(model: nn.Module) -> int:
    """Rows below which this model's layers are slower than with this many: a smaller batch is better padded."""
    return _LEAST_ROWS if any(isinstance(module, PackedLinear) for module in model.modules()) else 1


def can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def _multiply(rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


def _check_invariance(model: nn.Module) -> None:
    """Compare single rows with rows in batches, once for every shape of weights."""
    shapes: set[tuple[int, ...]] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            raise ConfigurationError(
                "batch_invariant needs weights that oneDNN can pack: a CPU, and float32 or a CPU with bfloat16.",
                param="batch_invariant",
            )
        if isinstance(module, PackedLinear) and module.shape not in shapes:
            shapes.add(module.shape)
            _check_rows(module)


def _check_rows(module: PackedLinear) -> None:
    rows = torch.randn(_CHECKED_ROWS, module.shape[1], generator=torch.Generator().manual_seed(0)).to(module.dtype)
    alone = torch.cat([module(row[None]) for row in rows])
    for count in (2, 7, 16, _CHECKED_ROWS):
        if not torch.equal(module(rows[:count]), alone[:count]):
            raise ConfigurationError(
                f"batch_invariant cannot be had here: oneDNN gives a row of {tuple(module.shape)} other values when it "
                f"comes with {count - 1} more.",
                param="batch_invariant",
            )
