"""Thresholds of top-k, top-p and min-p: kernels against sorting, and sorting against the plain definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain_sampling import SamplingRow, plain_sample
from updraft.kernels.sampling.launch import TILE
from updraft.kernels.sampling.reference import ranks, sample_reference, thresholds_reference
from updraft.kernels.sampling.types import LOWEST_RANK, LogitRows, Sampling, Truncation
from updraft.protocol.sampling import ResolvedParams

pytest.importorskip("triton")
import triton.language as tl
from updraft.kernels.sampling import triton_truncation as truncation_triton
from updraft.kernels.sampling.triton_truncation import launch_thresholds

VOCABULARY = TILE + 37
WARM = 1.0


def some_logits(rows: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3


def some_rows(logits: torch.Tensor, *temperatures: float, mask: torch.Tensor | None = None) -> LogitRows:
    return LogitRows(logits, torch.tensor(temperatures, dtype=torch.float64), mask)


def top_k(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def share(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def num_kept(rows: LogitRows, truncation: Truncation, *, by_kernel: bool = True) -> list[int]:
    threshold = launch_thresholds(rows, truncation) if by_kernel else thresholds_reference(rows, truncation)
    return (ranks(rows.logits.float()) >= threshold[:, None]).sum(1).tolist()


@pytest.mark.parametrize(
    ("temperatures", "truncation"),
    [
        ((WARM, WARM, 0.5, 2.0), Truncation(top_k=top_k(1, 50, 0, VOCABULARY))),
        ((WARM, 0.0, 0.5, 2.0), Truncation(top_k=top_k(VOCABULARY + 5, 3, TILE, 2))),
        ((WARM, 0.7, 2.0, 0.1), Truncation(top_p=share(0.5, 0.95, 0.999, 1e-9))),
        ((WARM, 0.0, 1.5, 1e-5), Truncation(top_p=share(1.0, 0.9, 0.3, 0.9))),
        ((WARM, 0.0, 2.0, 1e-5), Truncation(min_p=share(0.1, 0.1, 0.999, 0.0))),
        ((1.5, 1.5, 1.0, 1.2), Truncation(top_k(20, 700, 0, 40), share(0.95, 0.99, 0.8, 1), share(0, 0, 0.2, 0.01))),
    ],
    ids=["k", "k-greedy", "p", "p-greedy", "min-p", "all"],
)
def test_kernels_keep_what_sorting_keeps(temperatures, truncation) -> None:
    rows = some_rows(some_logits(4), *temperatures)
    expected = num_kept(rows, truncation, by_kernel=False)
    assert num_kept(rows, truncation) == expected
    assert min(expected) >= 1


def test_no_rows() -> None:
    assert launch_thresholds(some_rows(some_logits(0)), Truncation(top_k=top_k())).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_of_equal_logits_the_first_are_kept(dtype) -> None:
    coarse = (some_logits(2) / 3).round().to(dtype)  # seven values or so, zeros of both signs among them
    coarse[0, 3] = -0.0
    rows = some_rows(coarse, WARM, WARM)
    for truncation in (Truncation(top_k=top_k(9, 400)), Truncation(top_p=share(0.3, 0.77))):
        assert num_kept(rows, truncation) == num_kept(rows, truncation, by_kernel=False)
    assert num_kept(rows, Truncation(top_k=top_k(9, 400))) == [9, 400]


def test_masked_tokens_are_never_kept() -> None:
    words = -(-VOCABULARY // 32)
    mask = torch.full((2, words), 0x0F0F0F0F, dtype=torch.int32)
    mask[1] = 0
    mask[1, words - 1] = 2  # a single token
    truncation = Truncation(top_k=top_k(30, 5), top_p=share(0.9, 0.9))
    rows = some_rows(some_logits(2), WARM, WARM, mask=mask)
    assert launch_thresholds(rows, truncation).tolist() == thresholds_reference(rows, truncation).tolist()


def test_uncollected_ranks_are_read_from_the_row(monkeypatch) -> None:
    monkeypatch.setattr(truncation_triton, "_CAPACITY", tl.constexpr(16))
    flat = torch.zeros(2, VOCABULARY)
    flat[:, 7] = 1.0
    rows = some_rows(flat, WARM, WARM)
    assert num_kept(rows, Truncation(top_k=top_k(2, 999))) == [2, 999]
    truncation = Truncation(top_p=share(0.25, 0.9))
    assert num_kept(rows, truncation) == num_kept(rows, truncation, by_kernel=False)


def test_rows_of_nothing_keep_to_their_bounds() -> None:
    nothing = some_rows(torch.full((1, 40), -torch.inf), WARM)
    launch_thresholds(nothing, Truncation(top_k(3), share(0.5), share(0.1)))  # comes to an end, without a warning


def test_reference_keeps_what_the_definition_keeps() -> None:
    draws = 300
    logits = some_logits(1, 60).expand(draws, -1)
    for options in ({"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01}):
        truncation = Truncation(
            top_k(*[options.get("top_k", 0)] * draws),
            share(*[options.get("top_p", 1.0)] * draws),
            share(*[options.get("min_p", 0.0)] * draws),
        )
        seeds, positions = torch.full((draws,), 5), torch.arange(draws)
        sampling = Sampling(torch.full((draws,), 1.3, dtype=torch.float64), seeds, positions, truncation)
        params = ResolvedParams(temperature=1.3, **options)
        expected = plain_sample(logits, [SamplingRow(5, i, params) for i in range(draws)])
        assert sample_reference(logits, sampling).tolist() == expected
        assert len(set(expected)) > 3


def test_ranks_order_as_a_stable_descending_sort() -> None:
    logits = torch.tensor([[0.0, -0.0, -1.5, 3e38, -torch.inf, 1e-40, -1e-40, 3e38, torch.inf]])
    order = ranks(logits).argsort(dim=-1, descending=True)[0].tolist()
    assert order == np.argsort(-logits[0].numpy(), kind="stable").tolist()
    assert int(ranks(logits).min()) > LOWEST_RANK
