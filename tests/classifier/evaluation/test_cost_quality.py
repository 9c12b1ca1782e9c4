"""The cost-quality curve matches a protocol worked by hand, and has the properties of such curves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from updraft.classifier.evaluation.cost_quality import (
    CostQualityCurve,
    cost_quality,
    fine_curve,
    oracle_scores,
)


def test_eleven_thresholds_by_hand() -> None:
    """Ten rows, scores 0 to 9; the weak model is always wrong, the strong one right on the five highest scores."""
    scores = np.arange(10.0)
    weak, strong = np.zeros(10), (scores >= 5).astype(float)
    curve = cost_quality(scores, weak, strong)
    assert curve.share == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert curve.accuracy == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    # The triangle up to one half, then the rectangle, over the gap of one half.
    assert curve.apgr == pytest.approx((0.125 + 0.25) / 0.5)
    assert curve.cpt(0.5) == pytest.approx(0.25)
    assert curve.cpt(0.8) == pytest.approx(0.4)


def test_the_last_threshold_sends_nothing_up() -> None:
    """Equal scores go together: all at any threshold but the last."""
    curve = cost_quality(np.ones(20), np.zeros(20), np.ones(20))
    assert sorted(set(curve.share)) == [0.0, 1.0]
    assert curve.apgr == pytest.approx(0.5)


@given(st.integers(20, 200), st.integers(0, 10_000))
def test_the_order_is_all_that_counts(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, weak, strong = rng.permutation(n) / n, (rng.random(n) < 0.4) * 1.0, (rng.random(n) < 0.8) * 1.0
    one, other = cost_quality(scores, weak, strong), cost_quality(scores**3, weak, strong)
    # Between two ranks the interpolated threshold may fall on either side, never across a row.
    assert one.share == pytest.approx(other.share, abs=1.5 / n)
    oracle = fine_curve(oracle_scores(weak, strong), weak, strong)
    fine = fine_curve(scores, weak, strong)
    at = np.linspace(0, 1, 50)
    assert (np.interp(at, oracle.share, oracle.accuracy) >= np.interp(at, fine.share, fine.accuracy) - 1e-9).all()
    assert fine.accuracy[-1] == pytest.approx(strong.mean())


def test_no_gap_has_no_apgr() -> None:
    assert np.isnan(cost_quality(np.arange(10.0), np.ones(10), np.ones(10)).apgr)


def test_cpt_interpolates() -> None:
    curve = CostQualityCurve(np.array([0.0, 0.4, 1.0]), np.array([0.5, 0.7, 0.9]), 0.5, 0.9)
    assert curve.cpt(0.75) == pytest.approx(0.7)
