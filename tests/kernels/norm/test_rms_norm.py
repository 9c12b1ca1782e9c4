"""RMSNorm kernels against the reference, and the reference against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from updraft.kernels.norm.ops import add_rms_norm, rms_norm
from updraft.kernels.norm.reference import rms_norm_reference
from updraft.kernels.norm.types import Norm
from updraft.protocol.errors import ConfigurationError

pytest.importorskip("triton")
from updraft.kernels.norm.triton import launch_rms_norm

SHAPES = [(0, 64), (1, 64), (3, 100), (33, 128), (65, 7), (2, 5120)]
DTYPES = [torch.float32, torch.float16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3}


def some(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for kernels to write in is full of NaN."""
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, torch.nan, **options))


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Rounded in the same places, halves are equal but for a few that float32 has on the other side of a border."""
    if got.dtype == torch.float16 and got.numel() and (got == expected).float().mean() < 0.98:
        return False
    return torch.allclose(got.float(), expected.float(), rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype])


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_is_the_reference(shape, dtype, unit_offset, monkeypatch) -> None:
    poisoned(monkeypatch)
    norm = Norm(some(shape[1], dtype=dtype, seed=1), 1e-5, unit_offset)
    wide = some(shape[0], shape[1] + 16, dtype=dtype)
    hidden = wide[:, 8 : 8 + shape[1]]  # rows that lie apart
    before = wide.clone()
    assert close(launch_rms_norm(hidden, norm), rms_norm_reference(hidden, norm))
    assert torch.equal(wide, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_addition_rounds_the_residual_as_the_addition_alone(shape, dtype, monkeypatch) -> None:
    poisoned(monkeypatch)
    norm = Norm(some(shape[1], dtype=dtype, seed=1), 1e-6)
    update, residual = some(*shape, dtype=dtype), some(*shape, dtype=dtype, seed=2) * 100
    expected = residual + update
    got = launch_rms_norm(update, norm, residual)
    assert torch.equal(residual, expected)
    assert close(got, rms_norm_reference(expected, norm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_is_torch_rms_norm(dtype) -> None:
    hidden, weight = some(5, 96, dtype=dtype), some(96, dtype=dtype, seed=1)
    for unit_offset in (False, True):
        norm = Norm(weight, 1e-5, unit_offset)
        expected = functional.rms_norm(hidden.double(), (96,), weight.double() + unit_offset, 1e-5)
        tolerance = 1e-6 if dtype == torch.float32 else 2**-7  # rounded twice
        for computed in (rms_norm(hidden, norm), rms_norm_reference(hidden, norm)):
            assert torch.allclose(computed.double(), expected, rtol=tolerance, atol=1e-6)
        residual = hidden.clone()
        assert torch.equal(add_rms_norm(hidden, residual, norm), rms_norm(hidden + hidden, norm))


def test_wrong_shapes_are_refused() -> None:
    norm = Norm(torch.ones(8), 1e-6)
    for hidden in (torch.ones(2, 9), torch.ones(2, 8).half(), torch.ones(8, 2).T):
        with pytest.raises(ConfigurationError, match="norm"):
            rms_norm(hidden, norm)
    with pytest.raises(ConfigurationError, match="cannot add"):
        add_rms_norm(torch.ones(2, 8), torch.ones(3, 8), norm)
