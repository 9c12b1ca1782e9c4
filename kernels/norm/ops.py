"""RMSNorm in the three forms that decoders need: alone, behind a residual addition, and over the heads of attention."""

from __future__ import annotations

from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..runtime.backend import uses_native, uses_triton
from ..runtime.native_library import LANES
from .cpu import native_rms_norm
from .reference import rms_norm_reference
from .types import Norm

_MAX_SIZE = 2**15  # elements of a row that one program holds


def rms_norm(hidden: Tensor, norm: Norm) -> Tensor:
    """The norm of each row of `hidden` (rows, size): a new tensor. Rows may lie apart; their elements may not."""
    _check(hidden, norm)
    if uses_triton(hidden):
        from .triton import launch_rms_norm

        return launch_rms_norm(hidden, norm)
    if uses_native(hidden, multiple=LANES):
        return native_rms_norm(hidden, norm)
    return rms_norm_reference(hidden, norm)


def add_rms_norm(update: Tensor, residual: Tensor, norm: Norm) -> Tensor:
    """Add `update` (rows, size) to `residual` in place, rounded to its dtype, and return the norm of the sum."""
    _check(update, norm)
    if residual.shape != update.shape or residual.dtype != update.dtype or residual.stride(-1) != 1:
        raise ConfigurationError(f"add_rms_norm: {_kind(update)} cannot be added to {_kind(residual)}.")
    if uses_triton(update):
        from .triton import launch_rms_norm

        return launch_rms_norm(update, norm, residual)
    if uses_native(update, multiple=LANES):
        return native_rms_norm(update, norm, residual)
    residual.add_(update)
    return rms_norm_reference(residual, norm)


def qk_norm_(heads: Tensor, num_query_heads: int, query_norm: Norm, key_norm: Norm) -> None:
    """Norm the heads of query and key over head_dim, in place: the QK-norm of Qwen 3 and Gemma 3.

    `heads` (tokens, heads, head_dim) is a view of the joint projection, whose rows may be longer: `num_query_heads`
    of the query first, the key's behind them. The two norms share `eps` and `unit_offset`.
    """
    _check(heads, query_norm)
    _check(heads, key_norm)
    if (query_norm.eps, query_norm.unit_offset) != (key_norm.eps, key_norm.unit_offset):
        raise ConfigurationError("qk_norm_: the norms of query and key differ in eps or unit_offset.")
    if uses_triton(heads):
        from .triton import launch_qk_norm

        launch_qk_norm(heads, num_query_heads, query_norm, key_norm)
        return
    for part, norm in ((heads[:, :num_query_heads], query_norm), (heads[:, num_query_heads:], key_norm)):
        part.copy_(rms_norm_reference(part, norm))


def _check(hidden: Tensor, norm: Norm) -> None:
    size = hidden.shape[-1]
    if norm.weight.shape != (size,) or norm.weight.dtype != hidden.dtype or hidden.stride(-1) != 1 or size > _MAX_SIZE:
        raise ConfigurationError(
            f"A norm with weights {_kind(norm.weight)} cannot take {_kind(hidden)}: it needs the same dtype, "
            f"dense rows of the same size, and at most {_MAX_SIZE} elements in each."
        )


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
