"""Gated activations in Triton, equal to `reference`. A program computes a part of one row."""

# Pyright cannot check the types inside Triton kernels.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.launch import Launch
from .types import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation

_SQRT_2_OVER_PI: tl.constexpr = tl.constexpr(0.7978845608028654)
_CUBIC: tl.constexpr = tl.constexpr(0.044715)
_ALPHA, _LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)


def launch_gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows == 0:
        return out
    launch = gated_activation_launch(size)
    gated_activation_kernel[(rows, triton.cdiv(size, launch.tiles["BLOCK"]))](
        gate_up, out, size, gate_up.stride(0), ACTIVATION=activation, num_warps=launch.num_warps, **launch.tiles
    )
    return out


def gated_activation_launch(size: int) -> Launch:
    """Return the launch for rows of `size` elements. BLOCK: elements of a row per program."""
    return Launch(num_warps=4, tiles={"BLOCK": 2048 if size >= 2048 else 1024})


@triton.jit
def gated_activation_kernel(gate_up, out, size, row_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    address = gate_up + row * row_stride + columns
    gate = tl.load(address, inside, 0.0)
    up = tl.load(address + size, inside, 0.0).to(tl.float32)
    if ACTIVATION == "swigluoai":
        gate = tl.minimum(gate.to(tl.float32), _LIMIT).to(gate.dtype)
        up = tl.clamp(up, -_LIMIT, _LIMIT) + 1
    active = _activation(gate.to(tl.float32), ACTIVATION).to(gate.dtype)
    tl.store(out + row * size + columns, (active.to(tl.float32) * up).to(gate.dtype), inside)


@triton.jit
def _activation(gate, ACTIVATION: tl.constexpr):
    """Return silu(x) = x * sigmoid(x), or gelu(x) ~ x * sigmoid(2z), because (1 + tanh z) / 2 = sigmoid(2z)."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate)
    if ACTIVATION == "swigluoai":
        return gate * tl.sigmoid(gate * _ALPHA)
    inner = _SQRT_2_OVER_PI * (gate + _CUBIC * gate * gate * gate)
    return gate * tl.sigmoid(2 * inner)
