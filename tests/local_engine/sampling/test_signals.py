"""Signals are the textbook quantities, for every row of a step and for any logits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from updraft.local_engine.sampling.signal_meter import SignalMeter
from updraft.local_engine.sampling.signals import (
    TokenSignals,
    log_softmax,
    token_logprobs,
)
from updraft.local_engine.sampling.truncation import largest

steps = st.tuples(st.integers(1, 5), st.integers(2, 30)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=st.floats(-20, 20, width=32))
)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


@given(logits=steps)
def test_signals(logits):
    before = logits.copy()
    rows = SignalMeter(logits.shape[1]).measure(logits)
    np.testing.assert_array_equal(logits, before, "the logits stay as they are")
    for row, measured in zip(logits, rows, strict=True):
        p = softmax(row)
        best = np.sort(row)[::-1].astype(np.float64)
        assert measured.token == row.argmax()
        for token in range(len(row)):
            signals = measured.signals(token)
            assert signals.logprob == pytest.approx(np.log(p[token]), abs=1e-4)
            assert signals.entropy == pytest.approx(-(p * np.log(p)).sum(), abs=1e-4)
            assert signals.margin == pytest.approx(best[0] - best[1], abs=1e-4)
        assert [value for _, value in measured.top(3)] == pytest.approx(np.log(np.sort(p)[::-1][:3]), abs=1e-4)
        np.testing.assert_allclose(token_logprobs(row[None], np.array([1])), np.log(p[1]), atol=1e-4)
        np.testing.assert_allclose(log_softmax(row[None])[0], np.log(p), atol=1e-4)


def test_a_large_vocabulary():
    logits = np.random.default_rng(0).standard_normal((3, 151_936)).astype(np.float32) * 4
    for row, measured in zip(logits, SignalMeter(151_936).measure(logits), strict=True):
        p = softmax(row)
        assert measured.entropy == pytest.approx(-(p * np.log(p)).sum(), abs=2e-3)
        assert [token for token, _ in measured.top(20)] == np.argsort(-row, kind="stable")[:20].tolist()
        assert measured.logprob(17) == pytest.approx(np.log(p[17]), abs=1e-4)


def test_the_many_unlikely_tokens_count():
    """Each alone is too little to change a sum of one in single precision, all together they are not."""
    logits = np.full((1, 160_000), -16.65, np.float32)
    logits[0, :16] = 0
    (row,) = SignalMeter(160_000).measure(logits)
    p = softmax(logits[0])
    assert row.log_total == pytest.approx(-np.log(p[0]), abs=5e-5)
    assert row.entropy == pytest.approx(-(p * np.log(p)).sum(), abs=1e-3)


def test_the_first_of_equals_is_the_most_likely():
    for places in ((5, 4), (3, 20), (40, 17), (99, 96), (0, 16), (63,)):
        logits = np.full((1, 100), -1, np.float32)
        logits[0, list(places)] = 7
        (row,) = SignalMeter(100).measure(logits)
        assert row.token == min(places)
        assert row.margin == (8 if len(places) == 1 else 0)


def test_one_token_leads_by_infinity():
    (row,) = SignalMeter(1).measure(np.array([[3]], np.float32))
    assert (row.token, row.signals(0)) == (0, TokenSignals(0, 0, np.inf))


def test_rows_of_a_view():
    """Rows from the engine are a slice of llama.cpp's buffer, or a choice of its rows."""
    logits = np.random.default_rng(1).standard_normal((6, 50)).astype(np.float32)
    tokens = [row.token for row in SignalMeter(50).measure(logits[::2])]
    assert tokens == logits[::2].argmax(axis=1).tolist()


def test_impossible_tokens_do_not_spoil_the_entropy():
    (row,) = SignalMeter(3).measure(np.array([[0, -np.inf, 0]], dtype=np.float32))
    assert row.signals(0).entropy == pytest.approx(np.log(2), abs=1e-5)
    assert row.is_finite


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_rows_that_are_no_numbers_are_known_and_alone(poison):
    logits = np.zeros((3, 100), np.float32)
    logits[1, 40] = poison
    assert [row.is_finite for row in SignalMeter(100).measure(logits)] == [True, False, True]


@given(row=arrays(np.float32, st.integers(1, 3000), elements=st.floats(-9, 9, width=32)), count=st.integers(0, 20))
def test_top_tokens(row, count):
    top = largest(row, count)
    assert len(set(top.tolist())) == min(count, len(row))
    np.testing.assert_array_equal(row[top], np.sort(row)[::-1][:count])


@pytest.mark.parametrize("kinds", [1, 2, 50, 10**6])
def test_of_equal_tokens_the_lower_ids_are_top(kinds):
    row = np.random.default_rng(0).integers(0, kinds, 152_001).astype(np.float32)
    for count in (1, 5, 20):
        np.testing.assert_array_equal(largest(row, count), np.argsort(-row, kind="stable")[:count])
