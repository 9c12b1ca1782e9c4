"""The measures against scikit-learn and against populations whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from updraft.classifier.calibration.probability_curve import fit_curve
from updraft.classifier.evaluation.metrics import auroc, bootstrap, ece, ece_by_chance, reliability


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=60))
def test_auroc_equals_scikit_learn_with_ties(rows: list[tuple[int, bool]]) -> None:
    scores = np.array([score for score, _ in rows], float)
    positive = np.array([label for _, label in rows])
    if positive.all() or not positive.any():
        assert np.isnan(auroc(scores, positive))
    else:
        assert auroc(scores, positive) == pytest.approx(roc_auc_score(positive, scores))


def test_ece_of_an_honest_and_of_a_boastful_forecast() -> None:
    rng = np.random.default_rng(0)
    p = rng.uniform(size=50_000)
    y = rng.uniform(size=50_000) < p
    assert ece(p, y) < 0.01
    assert ece(np.full(1000, 0.9), np.zeros(1000)) == pytest.approx(0.9)
    table = reliability(p, y, bins=10)
    assert [b.count for b in table] == [5000] * 10
    assert [b.predicted for b in table] == sorted(b.predicted for b in table)


def test_bootstrap_interval_covers_the_mean_at_its_level() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for seed in range(100):
        sample = rng.normal(size=80)
        low, high = bootstrap(lambda rows, s=sample: float(s[rows].mean()), 80, draws=200, seed=seed)
        covered += low <= 0 <= high
    assert 85 <= covered <= 100


@pytest.mark.parametrize("distort", [lambda s: 3 * s, lambda s: 0.3 * s - 1, lambda s: s**3])
def test_calibration_makes_a_distorted_score_honest(distort) -> None:
    rng = np.random.default_rng(2)
    logit = rng.normal(0, 1.5, 12_000)
    gain = rng.uniform(size=12_000) < 1 / (1 + np.exp(-logit))
    score = distort(logit)
    curve = fit_curve(score[:6000], gain[:6000])
    before = ece(1 / (1 + np.exp(-score[6000:])), gain[6000:])
    p = curve(score[6000:])
    assert ece(p, gain[6000:]) < min(0.025, 0.5 * before)
    assert auroc(p, gain[6000:]) == pytest.approx(auroc(score[6000:], gain[6000:]), abs=1e-3)


@given(st.integers(1, 400), st.floats(0, 1), st.floats(1e-3, 100), st.integers(0, 10**6))
def test_a_calibration_curve_rises_and_stays_a_probability(n: int, rate: float, scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(0, scale, n)
    curve = fit_curve(scores, rng.uniform(size=n) < rate)
    assert (curve.widths > 0).all()
    assert (curve.rises >= -1e-12).all()
    p = curve(np.concatenate((scores, [-1e9, 1e9])))
    assert ((p > -1e-9) & (p < 1 + 1e-9)).all()


def test_calibration_error_by_chance_is_that_of_honest_probabilities() -> None:
    rng = np.random.default_rng(0)
    p = rng.beta(1, 2, 600)
    honest = np.mean([ece(p, rng.random(600) < p) for _ in range(300)])
    assert ece_by_chance(p) == pytest.approx(honest, rel=0.05)
    assert ece_by_chance(np.tile(p, 16)) < 0.4 * honest, "luck evens out over more rows"
    assert ece_by_chance(np.array([0.0, 1.0] * 50)) == 0
    assert ece(p, rng.random(600) < p**2) > 2 * ece_by_chance(p), "a score that is not honest shows more"
