"""RMSNorm alone and after a residual addition. (Attention heads are normed on their way to the KV cache.)"""

from __future__ import annotations

from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..runtime.backend import uses_native, uses_triton
from ..runtime.native_library import LANES
from .cpu import native_rms_norm
from .reference import rms_norm_reference
from .types import Norm

_MAX_SIZE = 2**15  # maximum elements of a row, which one program holds


def rms_norm(hidden: Tensor, norm: Norm) -> Tensor:
    """Return the normalised rows of `hidden` (rows, size) in a new tensor. Rows may have any stride."""
    _check(hidden, norm)
    if uses_triton(hidden):
        from .triton import launch_rms_norm

        return launch_rms_norm(hidden, norm)
    if uses_native(hidden, multiple=LANES):
        return native_rms_norm(hidden, norm)
    return rms_norm_reference(hidden, norm)


def add_rms_norm(update: Tensor, residual: Tensor, norm: Norm) -> Tensor:
    """Add `update` (rows, size) to `residual` in place, rounded to its dtype. Return the sum's normalised rows."""
    _check(update, norm)
    if residual.shape != update.shape or residual.dtype != update.dtype or residual.stride(-1) != 1:
        raise ConfigurationError(f"add_rms_norm: cannot add {_kind(update)} to {_kind(residual)}.")
    if uses_triton(update):
        from .triton import launch_rms_norm

        return launch_rms_norm(update, norm, residual)
    if uses_native(update, multiple=LANES):
        return native_rms_norm(update, norm, residual)
    residual.add_(update)
    return rms_norm_reference(residual, norm)


def _check(hidden: Tensor, norm: Norm) -> None:
    size = hidden.shape[-1]
    if norm.weight.shape != (size,) or norm.weight.dtype != hidden.dtype or hidden.stride(-1) != 1 or size > _MAX_SIZE:
        raise ConfigurationError(
            f"A norm with weights {_kind(norm.weight)} cannot take {_kind(hidden)}: the input needs the same dtype and "
            f"contiguous rows of the same size, at most {_MAX_SIZE}."
        )


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
