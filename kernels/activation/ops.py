"""Gated activations of feed-forward layers (Shazeer 2020): one half of a joint projection gates the other."""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from ...protocol.errors import ConfigurationError
from ..runtime.backend import uses_native, uses_triton
from .cpu import native_gated_activation
from .reference import gated_activation_reference
from .types import Activation


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up, (rows, size), where `gate_up` (rows, 2 * size) holds the gate, then up.

    swigluoai clamps both parts, and adds 1 to up. The activation is rounded to the dtype before the product, as in
    separate layers. Rows may have any stride.
    """
    if activation not in get_args(Activation):
        raise ConfigurationError(f"activation={activation!r} is not one of {', '.join(get_args(Activation))}.")
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ConfigurationError(f"gated_activation: rows need gate and up side by side, got {tuple(gate_up.shape)}.")
    if uses_triton(gate_up):
        from .triton import launch_gated_activation

        return launch_gated_activation(gate_up, activation)
    if uses_native(gate_up):
        return native_gated_activation(gate_up, activation)
    return gated_activation_reference(gate_up, activation)
