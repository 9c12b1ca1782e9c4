"""The kernels that go over rows once and are bound by memory: norms, gated activations, and tokens from logits.

Sizes are those of Llama 3.1 8B.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.activation.ops import gated_activation
from ...kernels.activation.reference import gated_activation_reference
from ...kernels.activation.types import Activation
from ...kernels.norm.ops import add_rms_norm, rms_norm
from ...kernels.norm.reference import rms_norm_reference
from ...kernels.norm.types import Norm
from ...kernels.sampling.ops import sample
from ...kernels.sampling.types import Sampling
from .measure import Case, Run

_HIDDEN, _INTERMEDIATE, _VOCABULARY = 4096, 14336, 128256
_DTYPE = torch.bfloat16
_SETS = 4


def row_cases(*, short: bool) -> list[Callable[[], Case]]:
    rows = (8192,) if short else (256, 8192)
    makers = (norm_case, add_norm_case, gated_case)
    over_rows = [partial(make, count) for make in makers for count in rows]
    return [*over_rows, partial(gated_case, 8192, activation="gelu_tanh"), partial(sample_case, 256)]


def norm_case(rows: int, size: int = _HIDDEN, device: str = "cuda") -> Case:
    hidden = _sets(rows, size, device)
    norm = Norm(torch.ones(size, device=device, dtype=_DTYPE), 1e-5)
    return Case(
        f"rms_norm {rows}x{size}",
        lambda i: rms_norm(hidden[i], norm),
        bytes_moved=2 * hidden[0].nbytes,
        peers={
            "torch": lambda: lambda i: functional.rms_norm(hidden[i], (size,), norm.weight, norm.eps),
            "torch.compile": lambda: _compiled(partial(rms_norm_reference, norm=norm), hidden),
        },
        sets=_SETS,
    )


def add_norm_case(rows: int, size: int = _HIDDEN, device: str = "cuda") -> Case:
    update, residual = _sets(rows, size, device), _sets(rows, size, device)
    norm = Norm(torch.ones(size, device=device, dtype=_DTYPE), 1e-5)

    def plain(update: Tensor, residual: Tensor) -> Tensor:
        return rms_norm_reference(residual.add_(update), norm)

    return Case(
        f"add_rms_norm {rows}x{size}",
        lambda i: add_rms_norm(update[i], residual[i], norm),
        bytes_moved=4 * update[0].nbytes,
        peers={"torch.compile": lambda: _compiled(plain, update, residual)},
        sets=_SETS,
    )


def gated_case(rows: int, size: int = _INTERMEDIATE, device: str = "cuda", activation: Activation = "silu") -> Case:
    gate_up = _sets(rows, 2 * size, device)
    return Case(
        f"gated {activation} {rows}x{size}",
        lambda i: gated_activation(gate_up[i], activation),
        bytes_moved=gate_up[0].nbytes * 3 // 2,
        peers={"torch.compile": lambda: _compiled(partial(gated_activation_reference, activation=activation), gate_up)},
        sets=_SETS,
    )


def sample_case(rows: int, vocabulary: int = _VOCABULARY, device: str = "cuda") -> Case:
    """At temperature 1 without truncation; the peer is one multinomial draw from the softmax."""
    logits = [torch.randn(rows, vocabulary, device=device) for _ in range(_SETS)]
    sampling = Sampling(
        temperatures=torch.ones(rows, dtype=torch.float64, device=device),
        seeds=torch.arange(rows, device=device),
        positions=torch.arange(rows, device=device),
    )
    return Case(
        f"sample {rows}x{vocabulary}",
        lambda i: sample(logits[i], sampling),
        bytes_moved=logits[0].nbytes,
        peers={"torch": lambda: lambda i: torch.multinomial(logits[i].softmax(-1), 1)},
        sets=_SETS,
    )


def _compiled(function: Callable[..., Tensor], *sets: list[Tensor]) -> Run:
    compiled: Any = torch.compile(function)
    return lambda i: compiled(*(each[i] for each in sets))


def _sets(rows: int, size: int, device: str) -> list[Tensor]:
    return [torch.randn(rows, size, device=device, dtype=_DTYPE) for _ in range(_SETS)]
