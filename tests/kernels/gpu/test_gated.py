"""Gated activations on the device in bfloat16, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from updraft.kernels.activation.ops import gated_activation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "size"), [(1, 14336), (300, 4864), (4096, 3072), (5, 1030)])
def test_gated(rows, size, activation) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(rows, 2 * size, device="cuda", dtype=torch.bfloat16) * 3
    gate, up = gate_up.double().chunk(2, dim=-1)
    active = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    expected = active * up
    assert float((gated_activation(gate_up, activation).double() - expected).norm() / expected.norm()) < 4e-3
