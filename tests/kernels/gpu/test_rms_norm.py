"""RMSNorm on the device in bfloat16, against float64."""

from __future__ import annotations

import pytest
import torch
from updraft.kernels.norm.ops import add_rms_norm, rms_norm
from updraft.kernels.norm.types import Norm

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def exact(hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
    wide, weight = hidden.double(), norm.weight.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return normed * (1 + weight if norm.unit_offset else weight)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (7, 896), (300, 5120), (4096, 1024), (3, 8192)])
def test_rows(rows, size, unit_offset) -> None:
    torch.manual_seed(0)
    norm = Norm(torch.randn(size, device="cuda", dtype=torch.bfloat16), 1e-6, unit_offset)
    hidden, residual = torch.randn(2, rows, size, device="cuda", dtype=torch.bfloat16)
    assert error(rms_norm(hidden, norm), exact(hidden, norm)) < 4e-3  # two roundings to eight bits
    expected = residual + hidden
    normed = add_rms_norm(hidden, residual, norm)
    assert torch.equal(residual, expected)
    assert error(normed, exact(expected, norm)) < 4e-3
