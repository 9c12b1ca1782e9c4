"""Gated activations in C for CPUs: one call, and one pass over the data."""

from __future__ import annotations

import ctypes
from typing import get_args

import torch
from torch import Tensor

from ..runtime.native_library import call_fields, loaded
from .types import Activation


class _GateCall(ctypes.Structure):
    """The C struct `GateCall` of native/calls.h."""

    _fields_ = call_fields("gate_up out", "rows size stride activation num_threads is_bf16")


def native_gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """Compute `gated_activation` in C. `uses_native` must be true for the rows."""
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty((len(gate_up), size))
    call = _GateCall(
        gate_up=gate_up.data_ptr(),
        out=out.data_ptr(),
        rows=len(gate_up),
        size=size,
        stride=gate_up.stride(0),
        activation=get_args(Activation).index(activation),
        num_threads=torch.get_num_threads(),
        is_bf16=gate_up.dtype == torch.bfloat16,
    )
    loaded().gated(ctypes.byref(call))
    return out
