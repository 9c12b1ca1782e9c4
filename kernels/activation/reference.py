"""Gated activations in plain torch: the reference for the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import functional

from .types import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation


def gated_activation_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up of `gate_up` (rows, 2 * size)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "swigluoai":
        gate = gate.clamp(max=SWIGLU_LIMIT)
        return (up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1) * (gate * (gate * SWIGLU_ALPHA).sigmoid())
    return _ACTIVATIONS[activation](gate).mul_(up)


def _gelu_tanh(gate: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh")


_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {"silu": functional.silu, "gelu_tanh": _gelu_tanh}
