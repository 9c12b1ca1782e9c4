"""The gated activations of feed-forward layers (Shazeer 2020): one half of a joint projection gates the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor
from torch.nn import functional

from ...protocol.errors import ConfigurationError
from ..norm.cpu import can_compute, native_gated
from ..runtime.backend import uses_triton
from ..runtime.launch import Launch, launch_for

Activation = Literal["silu", "gelu_tanh"]


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up of `gate_up` (rows, 2 * size), the gate first: a new tensor (rows, size).

    The activation is rounded to the dtype before the product, as layers computed one by one do. Rows may lie apart.
    """
    if activation not in _ACTIVATIONS:
        raise ConfigurationError(f"activation={activation!r} is not one of {', '.join(_ACTIVATIONS)}.")
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ConfigurationError(f"gated: {tuple(gate_up.shape)} is not rows of gate and up side by side.")
    if uses_triton(gate_up):
        from .triton import launch_gated

        return launch_gated(gate_up, activation)
    if can_compute(gate_up):
        return native_gated(gate_up, activation)
    return reference_gated(gate_up, activation)


def reference_gated(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate).mul_(up)


def gated_launch(size: int, gpu_name: str) -> Launch:
    """BLOCK elements of one row in a program: two accesses of 16 bytes a thread in each half, of two-byte elements."""
    heuristic = Launch(num_warps=4, tiles={"BLOCK": 2048 if size >= 2048 else 1024})
    return launch_for("gated", str(size), gpu_name, heuristic)


def _gelu_tanh(gate: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh")


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": functional.silu, "gelu_tanh": _gelu_tanh}
