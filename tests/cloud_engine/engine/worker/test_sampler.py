"""Sampling against its definition: exact distributions, documented truncation, noise that depends on nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_sampling import SamplingRow, sample
from updraft.cloud_engine.engine.worker.sampler import log_probabilities
from updraft.protocol.sampling import ResolvedParams
from updraft.text.logit_edits import LogitEdits


def row(
    position: int = 0, *, seed: int = 5, temperature: float = 1.0, edits: LogitEdits | None = None, **options
) -> SamplingRow:
    return SamplingRow(seed, position, ResolvedParams(temperature=temperature, **options), edits)


def truncated_distribution(logits: np.ndarray, options: dict) -> np.ndarray:
    """The documented meaning, written the slow way: temperature, then top-k, top-p, min-p, typical-p."""
    scaled = logits.astype(np.float64) / options.get("temperature", 1.0)
    order = np.argsort(-scaled, kind="stable")
    kept = order[: options.get("top_k") or len(order)]
    probabilities = np.exp(scaled[kept] - scaled[kept].max())
    probabilities /= probabilities.sum()
    nucleus, mass = 0, 0.0
    while nucleus < len(kept) and mass < options.get("top_p", 1.0):
        mass += probabilities[nucleus]
        nucleus += 1
    keep = [i for i in range(nucleus) if probabilities[i] >= options.get("min_p", 0.0) * probabilities[0]]
    left = probabilities[keep] / probabilities[keep].sum()
    surprise = -np.log(np.maximum(left, 1e-300))
    typical, mass = [], 0.0
    for i in np.argsort(np.abs(surprise - (left * surprise).sum()), kind="stable"):
        if mass < options.get("typical_p", 1.0):
            typical.append(keep[i])
        mass += left[i]
    keep = typical
    out = np.zeros(len(logits))
    out[kept[keep]] = probabilities[keep]
    return out / out.sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.8, "top_k": 6},
        {"top_p": 0.75},
        {"min_p": 0.2},
        {"typical_p": 0.6},
        {"top_k": 8, "typical_p": 0.8},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_frequencies_pass_a_chi_square_test(options) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(2)) * 1.5
    draws = 20_000
    tokens = sample(logits.expand(draws, -1), [row(position, **options) for position in range(draws)])
    observed = np.bincount(tokens, minlength=12)
    expected = truncated_distribution(logits.numpy(), options) * draws
    assert observed[expected == 0].sum() == 0
    support = expected > 0
    statistic = (((observed - expected) ** 2)[support] / expected[support]).sum()
    freedom = support.sum() - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@given(
    st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=30, unique=True),
    st.fixed_dictionaries(
        {
            "temperature": st.floats(0.1, 2),
            "top_k": st.integers(0, 35),
            "top_p": st.floats(0.05, 1),
            "min_p": st.floats(0, 0.9),
            "typical_p": st.sampled_from([0.3, 0.7, 1.0]),
            "seed": st.integers(-(2**63), 2**63 - 1),
        }
    ),
)
def test_no_token_outside_the_truncation_is_ever_drawn(logits, options) -> None:
    allowed = truncated_distribution(np.array(logits, dtype=np.float32), options) > 0
    tokens = sample(torch.tensor(logits).expand(50, -1), [row(position, **options) for position in range(50)])
    outside = {token for token in tokens if not allowed[token]}
    probabilities = truncated_distribution(np.array(logits, dtype=np.float32), {"temperature": options["temperature"]})
    border = sorted(probabilities)[-int(allowed.sum()) - 1 :][0] if not allowed.all() else 0.0
    assert all(math.isclose(probabilities[token], border, rel_tol=1e-6) for token in outside)  # rounding at the border


def test_rows_do_not_influence_each_other() -> None:
    logits = torch.randn(40, 200, generator=torch.Generator().manual_seed(0))
    rows = [
        row(i, temperature=[0.0, 0.5, 1.0][i % 3], top_k=[0, 5][i % 2], top_p=[1.0, 0.8][i % 4 == 1], seed=i)
        for i in range(40)
    ]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(40)]
    assert sample(logits.flip(0), rows[::-1]) == together[::-1]
    assert together[::3] == logits[::3].argmax(-1).tolist()


def test_noise_depends_on_seed_and_position() -> None:
    flat = torch.zeros(64, 500)
    positions = sample(flat, [row(i) for i in range(64)])
    seeds = sample(flat, [row(0, seed=i) for i in range(64)])
    assert len(set(positions)) > 50
    assert len(set(seeds)) > 50
    assert sample(flat[:1], [row(0, seed=-1)]) == sample(flat[:1], [row(0, seed=2**64 - 1)])


def test_log_probabilities_name_the_likeliest_tokens() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]])
    first, second = log_probabilities(logits, [2, 0], 20)
    assert [token for token, _ in first.top] == [1, 2, 0]
    assert first.logprob == first.top[1][1]
    assert math.isclose(sum(math.exp(value) for _, value in second.top), 1, rel_tol=1e-6)
