"""Log-probabilities: kernels against the reference, and the reference against the engine's sampler."""

from __future__ import annotations

import pytest
import torch
from updraft.cloud_engine.engine.worker.sampler import log_probabilities as engine_log_probabilities
from updraft.kernels.sampling.launch import TILE
from updraft.kernels.sampling.ops import log_probabilities, stable_topk
from updraft.kernels.sampling.reference import log_probabilities_reference
from updraft.protocol.errors import ConfigurationError

pytest.importorskip("triton")
from updraft.kernels.sampling.triton_probabilities import launch_log_probabilities

VOCABULARY = TILE + 37


def some_logits(rows: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(shape, *, dtype: torch.dtype, **options) -> torch.Tensor:
        return torch.full(shape, torch.nan if dtype.is_floating_point else -77, dtype=dtype, **options)

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "vocabulary", "num_top"), [(0, 9, 2), (1, 9, 9), (2, TILE, 0), (3, VOCABULARY, 20)])
def test_reported_ones_are_those_of_the_reference(rows, vocabulary, num_top, dtype, monkeypatch) -> None:
    poison(monkeypatch)
    logits = some_logits(rows, vocabulary).to(dtype)
    chosen = torch.arange(rows) * 3
    got, expected = (
        report(logits, chosen, num_top) for report in (launch_log_probabilities, log_probabilities_reference)
    )
    assert torch.equal(got.ids, expected.ids)
    assert torch.allclose(got.values, expected.values, rtol=1e-5, atol=1e-5)
    assert torch.allclose(got.chosen, expected.chosen, rtol=1e-5, atol=1e-5)


def test_reference_reports_what_the_engine_reports() -> None:
    logits, chosen = some_logits(3, 50), [4, 0, 49]
    got = log_probabilities(logits, torch.tensor(chosen), 5)
    for index, expected in enumerate(engine_log_probabilities(logits, chosen, 5)):
        assert got.ids[index].tolist() == [token for token, _ in expected.top]
        assert torch.allclose(got.values[index], torch.tensor([value for _, value in expected.top]))
        assert abs(float(got.chosen[index]) - expected.logprob) < 1e-6


def test_impossible_tokens_are_reported_last() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0]])
    got = launch_log_probabilities(logits, torch.tensor([2]), 3)
    assert got.ids.tolist() == [[1, 3, 0]]
    assert got.chosen.tolist() == [-torch.inf]


def test_more_than_twenty_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="At most 20"):
        log_probabilities(some_logits(1), torch.tensor([0]), 21)


@pytest.mark.parametrize("num_top", [0, 1, 3, 20, 37])
@pytest.mark.parametrize("levels", [1, 2, 5, 1000])
def test_of_equals_the_lower_ids_are_likeliest_however_many_are_asked_for(num_top: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    logits = torch.randint(levels, (16, 37), generator=generator) / levels
    values, ids = stable_topk(logits, num_top)
    exact, order = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, exact[:, :num_top])
    assert torch.equal(ids, order[:, :num_top])


def test_reports_are_independent_of_other_rows() -> None:
    """bfloat16 has many equals."""
    logits = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    chosen = logits.argmax(dim=-1).tolist()
    few, many = (engine_log_probabilities(logits, chosen, num_top) for num_top in (2, 19))
    assert [one.top for one in few] == [one.top[:2] for one in many]
