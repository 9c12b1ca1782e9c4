"""The promise on populations whose true risk is known: kept often enough, and not by escalating everything."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta, betabinom
from updraft.classifier import guarantee
from updraft.classifier.guarantee import (
    ALPHAS,
    DELTA,
    NOTHING_LOCAL,
    Population,
    half_splits,
    hindsight_threshold,
    mean_threshold,
    most_on_average,
    populations,
    safe_threshold,
    true_risks,
)
from updraft.classifier.metrics import Bools, Floats


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("shape", populations(), ids=lambda shape: shape.name)
def test_the_true_risk_is_rarely_exceeded(shape: Population, alpha: float) -> None:
    draws = 1000
    rate = guarantee.violation_rate(shape, alpha, draws=draws)
    assert rate <= DELTA + 2.5 * np.sqrt(DELTA * (1 - DELTA) / draws)


def test_ignoring_confidence_breaks_it() -> None:
    """The check can fail: a threshold at the observed risk violates about every other time."""
    assert guarantee.violation_rate(populations()[0], 0.05, hindsight_threshold, draws=300) > 0.3


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("shape", populations(), ids=lambda shape: shape.name)
def test_on_average_the_true_risk_is_at_most_alpha(shape: Population, alpha: float) -> None:
    risks = true_risks(shape, alpha, mean_threshold, draws=1000)
    assert risks.mean() <= alpha + 3 * risks.std() / np.sqrt(len(risks))
    assert risks.mean() >= true_risks(shape, alpha, draws=200).mean(), "bolder than with confidence"


def test_one_loss_more_is_too_many_on_average() -> None:
    """The check can fail: where nearly each threshold is a loss, the average leaves no room for another."""
    shape = populations()[3]

    def bolder(p_gain: Floats, gain: Bools, alpha: float) -> float:
        return mean_threshold(p_gain, gain, alpha + 2 / (len(gain) + 1))

    risks = true_risks(shape, 0.02, bolder, draws=4000)
    assert risks.mean() > 0.02 + 3 * risks.std() / np.sqrt(len(risks))


@pytest.mark.parametrize(
    ("n", "alpha", "most"), [(99, 0.05, 4), (98, 0.05, 3), (19, 0.05, 0), (18, 0.05, -1), (9, 0.0, -1)]
)
def test_how_many_losses_an_average_allows(n: int, alpha: float, most: int) -> None:
    assert most_on_average(n, alpha) == most
    assert (most + 1) / (n + 1) <= alpha or most == -1
    assert (most + 2) / (n + 1) > alpha


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

    def always(p_gain: Floats, gain: Bools, alpha: float) -> float:
        return NOTHING_LOCAL

    sure, mean, up = (half_splits(p, gain, 0.1, rule, splits=100) for rule in (safe_threshold, mean_threshold, always))
    assert (sure.risk, mean.risk) <= (0.1, 0.1)
    assert mean.share_over_hindsight <= 1.15 < up.share_over_hindsight
    assert mean.share_over_hindsight < sure.share_over_hindsight < up.share_over_hindsight
    assert up.share_over_hindsight == pytest.approx(mean.always_over_hindsight)


def test_the_luck_of_two_halves() -> None:
    """Every threshold loses just what is allowed, so the prediction is the same for every split."""
    p = np.linspace(0, 1, 400)
    gain = np.ones(400, np.bool_)
    found = half_splits(p, gain, 0.1, splits=5)
    allowed = 14  # of 200 at alpha 0.1 and delta 0.1
    assert beta.ppf(1 - DELTA, allowed + 1, 200 - allowed) <= 0.1 < beta.ppf(1 - DELTA, allowed + 2, 199 - allowed)
    assert found.exceedance_by_noise == pytest.approx(betabinom.sf(20, 200, allowed + 0.5, 200 - allowed + 0.5))
