"""Norms and gated activations in C, for CPUs: one call and one pass where torch takes four or five of each."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..runtime.native_library import load

if TYPE_CHECKING:
    from ..activation.ops import Activation
    from .ops import Norm


class _NormCall(ctypes.Structure):
    """`NormCall` of native/calls.h, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("hidden", "residual", "weight", "out")),
        *(
            (name, ctypes.c_int64)
            for name in ("rows", "size", "stride", "residual_stride", "unit_offset", "num_threads", "is_bf16")
        ),
        ("eps", ctypes.c_double),
    )


class _GateCall(ctypes.Structure):
    """`GateCall` of native/calls.h, field for field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "size", "stride", "is_gelu", "num_threads", "is_bf16")),
    )


def can_compute(rows: Tensor, *, multiple: int = 1) -> bool:
    """Whether the C kernels take `rows` (rows, any); those of norms must be a `multiple` of LANES long."""
    return (
        rows.device.type == "cpu"
        and rows.dim() == 2
        and rows.dtype in (torch.float32, torch.bfloat16)
        and rows.shape[1] % multiple == 0
        and not (torch.is_grad_enabled() and rows.requires_grad)
        and load() is not None
    )


def native_rms_norm(hidden: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
    """`rms_norm`, or `add_rms_norm` where there is a `residual`, of what `can_compute`."""
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
    _library().rms_norm(ctypes.byref(call))
    return out


def native_gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """`gated` of what `can_compute`."""
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty((len(gate_up), size))
    call = _GateCall(
        gate_up=gate_up.data_ptr(),
        out=out.data_ptr(),
        rows=len(gate_up),
        size=size,
        stride=gate_up.stride(0),
        is_gelu=activation == "gelu_tanh",
        num_threads=torch.get_num_threads(),
        is_bf16=gate_up.dtype == torch.bfloat16,
    )
    _library().gated(ctypes.byref(call))
    return out


def _library() -> ctypes.CDLL:
    library = load()
    assert library is not None, "ask can_compute first"
    return library
