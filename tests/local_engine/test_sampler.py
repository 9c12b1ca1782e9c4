"""Sampling means what SamplingParams says, and signals are the textbook quantities."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.local_engine.sampler import Distribution, Sampler, token_logprobs
from updraft.protocol.sampling import SamplingParams

rows = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=30).map(lambda row: np.array(row, dtype=np.float32))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


@given(logits=rows)
def test_signals(logits):
    p = softmax(logits)
    best = np.sort(logits)[::-1].astype(np.float64)
    distribution = Distribution(logits)
    for token in range(len(logits)):
        signals = distribution.signals(token)
        assert signals.logprob == pytest.approx(np.log(p[token]), abs=1e-4)
        assert signals.entropy == pytest.approx(-(p * np.log(p)).sum(), abs=1e-4)
        assert signals.margin == pytest.approx(best[0] - best[1], abs=1e-4)
    assert [value for _, value in distribution.top(3)] == pytest.approx(np.log(np.sort(p)[::-1][:3]), abs=1e-4)
    np.testing.assert_allclose(token_logprobs(logits[None], np.array([1])), np.log(p[1]), atol=1e-4)


def test_impossible_tokens_do_not_spoil_the_entropy():
    signals = Distribution(np.array([0, -np.inf, 0], dtype=np.float32)).signals(0)
    assert signals.entropy == pytest.approx(np.log(2), abs=1e-5)


def allowed_tokens(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """Straight from the definition, token by token."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if params.top_k:
        order = order[: params.top_k]
    p = softmax(logits[order] / np.float64(params.temperature))
    kept, mass = [], 0.0
    for token, probability in zip(order, p, strict=True):
        if mass < params.top_p:
            kept.append((token, probability))
        mass += probability
    return {token for token, probability in kept if probability >= params.min_p * p[0]}


@given(
    logits=st.lists(st.integers(-80, 80), min_size=2, max_size=20, unique=True).map(
        lambda row: np.array(row, dtype=np.float32) / 8
    ),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([0.1, 0.77, 1.0]),
    min_p=st.sampled_from([0.0, 0.13]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_truncation(logits, temperature, top_k, top_p, min_p, seed):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    sampler, twin = Sampler(params, 1.0), Sampler(params, 1.0)
    drawn = [sampler.choose(logits) for _ in range(30)]
    assert set(drawn) <= allowed_tokens(logits, params)
    assert drawn == [twin.choose(logits) for _ in range(30)]


def test_frequencies():
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    sampler = Sampler(SamplingParams(temperature=1, top_p=0.9, seed=0), 0.0)
    counts = np.bincount([sampler.choose(logits) for _ in range(5000)], minlength=4) / 5000
    np.testing.assert_allclose(counts, np.array([0.5, 0.3, 0.15, 0]) / 0.95, atol=0.02)


def test_default_temperature_is_the_models():
    logits = np.array([0.0, 0.1, 0.0], dtype=np.float32)
    assert {Sampler(SamplingParams(), 0.0).choose(logits) for _ in range(20)} == {1}
    sampler = Sampler(SamplingParams(seed=1), 1.0)
    assert len({sampler.choose(logits) for _ in range(50)}) == 3
