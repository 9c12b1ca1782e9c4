"""The gated activation kernel against the reference, and the reference against the layer that models are built from."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from updraft.kernels.activation.ops import gated_activation
from updraft.kernels.activation.reference import gated_activation_reference
from updraft.protocol.errors import ConfigurationError

pytest.importorskip("triton")
from updraft.kernels.activation.triton import launch_gated_activation

# The interpreter's numpy reports what a sigmoid is meant to do: exp(-x) is infinite and its inverse 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swigluoai"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 8), (3, 1024), (5, 1030), (2, 2050), (1, 9)], ids=str)
def test_kernel_is_the_reference(shape, dtype, activation, monkeypatch) -> None:
    rows, size = shape
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, torch.nan, **options))
    wide = (torch.randn(rows, 2 * size + 8, generator=torch.Generator().manual_seed(0)) * 6).to(dtype)
    gate_up = wide[:, : 2 * size]
    got, expected = launch_gated_activation(gate_up, activation), gated_activation_reference(gate_up, activation)
    assert got.shape == (rows, size)
    # A cubic inside an exponential: near zero crossings of float32 only the absolute error is small.
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3}[dtype]
    assert torch.allclose(got.float(), expected.float(), rtol=tolerance, atol=tolerance)


def test_the_clamped_swiglu_is_that_of_gpt_oss() -> None:
    gate, up = torch.randn(2, 30, 40, generator=torch.Generator().manual_seed(0)) * 6
    clamped = gate.clamp(max=7)
    expected = (up.clamp(-7, 7) + 1) * clamped * torch.sigmoid(1.702 * clamped)
    joint = torch.cat((gate, up), dim=1)
    for implementation in (gated_activation, gated_activation_reference, launch_gated_activation):
        torch.testing.assert_close(implementation(joint, "swigluoai"), expected, rtol=1e-5, atol=1e-5)


def test_large_gates_neither_overflow_nor_vanish() -> None:
    gates = torch.tensor([[-60.0, -30.0, 0.0, 30.0, 60.0]])
    gate_up = torch.cat((gates, torch.ones(1, 5)), dim=1)
    for activation in ("silu", "gelu_tanh"):
        assert torch.allclose(launch_gated_activation(gate_up, activation), gates.clamp(min=0), atol=1e-6)


def test_reference_activates_the_gate_alone() -> None:
    joint = torch.randn(3, 14)
    gate, up = joint.chunk(2, dim=1)  # torch's gelu has other last bits for contiguous rows on some processors
    assert torch.equal(gated_activation_reference(joint, "silu"), functional.silu(gate) * up)
    assert torch.equal(gated_activation_reference(joint, "gelu_tanh"), functional.gelu(gate, approximate="tanh") * up)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="side by side"):
        gated_activation(torch.ones(2, 7), "silu")
    with pytest.raises(ConfigurationError, match="not one of"):
        gated_activation(torch.ones(2, 8), "relu")  # type: ignore[arg-type]


def test_a_launch_gives_every_thread_a_16_byte_access() -> None:
    pytest.importorskip("triton")
    from updraft.kernels.activation.triton import gated_activation_launch

    for size in (256, 4864, 14336):
        launch = gated_activation_launch(size)
        assert launch.tiles["BLOCK"] >= launch.num_warps * 32 * 8
