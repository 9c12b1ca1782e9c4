"""The promise on populations whose true risk is known: kept often enough, and not by escalating everything."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta, betabinom
from updraft.classifier import guarantee
from updraft.classifier.guarantee import ALPHAS, DELTA, Population, half_splits, populations, safe_threshold


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("shape", populations(), ids=lambda shape: shape.name)
def test_the_true_risk_is_rarely_exceeded(shape: Population, alpha: float) -> None:
    draws = 1000
    rate = guarantee.violation_rate(shape, alpha, draws=draws)
    assert rate <= DELTA + 2.5 * np.sqrt(DELTA * (1 - DELTA) / draws)


def test_ignoring_confidence_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: a threshold at the observed risk violates about every other time."""
    monkeypatch.setattr(guarantee, "safe_threshold", guarantee.hindsight_threshold)
    assert guarantee.violation_rate(populations()[0], 0.05, draws=300) > 0.3


@pytest.mark.parametrize("n", [60, 332, 2000])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_as_bold_as_clopper_and_pearson_allow(n: int, alpha: float) -> None:
    p = np.linspace(0, 1, n)
    gain = np.arange(n) % 3 == 0
    threshold = safe_threshold(p, gain, alpha)
    lost = int((gain & (p <= threshold)).sum())
    assert threshold == guarantee.NOTHING_LOCAL or beta.ppf(1 - DELTA, lost + 1, n - lost) <= alpha
    assert beta.ppf(1 - DELTA, lost + 2, n - lost - 1) > alpha or threshold == guarantee.NOTHING_LOCAL


def test_too_few_rows_promise_nothing() -> None:
    assert safe_threshold(np.linspace(0, 1, 20), np.zeros(20, np.bool_), 0.05) == guarantee.NOTHING_LOCAL


def test_equal_scores_stay_together() -> None:
    p = np.repeat([0.1, 0.6], 200)
    gain = np.arange(400) >= 330
    assert safe_threshold(p, gain, 0.05) == pytest.approx(0.1)


def test_always_escalating_fails_the_share() -> None:
    rng = np.random.default_rng(0)
    p = rng.random(600)
    gain = rng.random(600) < p * 0.5
    informed = half_splits(p, gain, 0.1, splits=50)
    assert informed.risk <= 0.1
    assert informed.share_over_hindsight < 1.6
    assert 1.0 / informed.hindsight_share > informed.share_over_hindsight + 0.1


def test_the_luck_of_two_halves() -> None:
    """Every threshold loses just what is allowed, so the prediction is the same for every split."""
    p = np.linspace(0, 1, 400)
    gain = np.ones(400, np.bool_)
    found = half_splits(p, gain, 0.1, splits=5)
    allowed = 14  # of 200 at alpha 0.1 and delta 0.1
    assert beta.ppf(1 - DELTA, allowed + 1, 200 - allowed) <= 0.1 < beta.ppf(1 - DELTA, allowed + 2, 199 - allowed)
    assert found.exceedance_by_noise == pytest.approx(betabinom.sf(20, 200, allowed + 0.5, 200 - allowed + 0.5))
