"""RMSNorm in C for CPUs: one call and one pass over the data, where torch needs several."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..runtime.native_library import call_fields, loaded
from .types import Norm


class _NormCall(ctypes.Structure):
    """The C struct `NormCall` of native/calls.h."""

    _fields_ = call_fields(
        "hidden residual weight out", "rows size stride residual_stride unit_offset num_threads is_bf16", "eps"
    )


def native_rms_norm(hidden: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
    """Compute `rms_norm`, or `add_rms_norm` with `residual`, in C. `uses_native` must be true for the rows."""
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    call = _NormCall(
        hidden=hidden.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        weight=norm.weight.data_ptr(),
        out=out.data_ptr(),
        rows=len(hidden),
        size=hidden.shape[1],
        stride=hidden.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        unit_offset=norm.unit_offset,
        num_threads=torch.get_num_threads(),
        is_bf16=hidden.dtype == torch.bfloat16,
        eps=norm.eps,
    )
    loaded().rms_norm(ctypes.byref(call))
    return out
