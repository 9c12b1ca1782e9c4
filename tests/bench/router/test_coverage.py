"""The promise on populations whose true risk is known: kept often enough, and not by escalating everything."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import betabinom
from updraft.bench.router.coverage import (
    ALPHAS,
    Population,
    graded,
    half_splits,
    hindsight,
    populations,
    promised,
    true_risks,
)
from updraft.classifier.calibration.bounds import max_losses
from updraft.classifier.calibration.operating_point import DELTA, operating_point
from updraft.classifier.calibration.rows import CalibrationRows
from updraft.classifier.calibration.threshold_path import ALWAYS, NEVER, Thresholds
from updraft.classifier.target import Target

ALL_UP = Thresholds(ALWAYS, NEVER, ALWAYS)
SHAPES = pytest.mark.parametrize("shape", populations(), ids=lambda shape: shape.name)


@SHAPES
@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_true_risk_is_rarely_exceeded(shape: Population, alpha: float) -> None:
    """Of what a router takes, with one gate and with three. `updraft bench router` does it with more draws."""
    draws = 1000
    risks = true_risks(shape, promised(alpha), draws=draws)
    assert (risks > alpha).mean() <= DELTA + 2.5 * np.sqrt(DELTA * (1 - DELTA) / draws)
    assert risks.mean() > 0.2 * alpha, "it is used, where there is something to keep"


@pytest.mark.parametrize("shape", populations()[:2], ids=lambda shape: shape.name)
def test_ignoring_confidence_breaks_it(shape: Population) -> None:
    """The check can fail: thresholds at the observed risk violate about every other time."""
    assert (true_risks(shape, hindsight(0.05), draws=300) > 0.05).mean() > 0.3


@SHAPES
def test_on_average_the_true_risk_is_at_most_alpha(shape: Population) -> None:
    risks = true_risks(shape, promised(0.05, "mean"), draws=1000)
    assert risks.mean() <= 0.05 + 3 * risks.std() / np.sqrt(len(risks))
    assert risks.mean() >= true_risks(shape, promised(0.05), draws=200).mean(), "bolder than with confidence"


def test_one_loss_more_is_too_many_on_average() -> None:
    """The check can fail: where nearly each threshold is a loss, the average allows no further loss."""
    shape = next(shape for shape in populations() if shape.name == "useless")
    risks = true_risks(shape, promised(0.02 + 2 / 501, "mean"), draws=4000)
    assert risks.mean() > 0.02 + 3 * risks.std() / np.sqrt(len(risks))


def test_too_few_rows_promise_nothing() -> None:
    few = graded(np.zeros(20, np.bool_), np.linspace(0, 1, 20))
    assert promised(0.05)(few).before == ALWAYS


def test_equal_scores_stay_together() -> None:
    rows = graded(np.arange(400) >= 330, np.repeat([0.1, 0.6], 200))
    assert promised(0.05)(rows).before == 0.1


def test_always_escalating_fails_the_share() -> None:
    rng = np.random.default_rng(0)
    p = rng.random(600)
    gain = rng.random(600) < p * 0.5

    def always(rows: CalibrationRows) -> Thresholds:
        return ALL_UP

    rules = promised(0.1), promised(0.1, "mean"), always
    sure, mean, up = (half_splits(p, gain, 0.1, rule, splits=100) for rule in rules)
    assert sure.risk <= mean.risk <= 0.1
    assert mean.share_over_hindsight <= 1.15 < up.share_over_hindsight
    assert mean.share_over_hindsight < sure.share_over_hindsight < up.share_over_hindsight
    assert up.share_over_hindsight == pytest.approx(mean.cloud_only_over_hindsight)


def test_the_luck_of_two_halves() -> None:
    """Every threshold loses just what is allowed, so the prediction is the same for every split."""
    p = np.linspace(0, 1, 400)
    gain = np.ones(400, np.bool_)
    halves = half_splits(p, gain, 0.1, promised(0.1), splits=5)
    alpha = operating_point(graded(gain[:200], p[:200]), Target("quality", 0.9)).alpha or 0.0
    allowed = max_losses(200, alpha, 0.9 * DELTA)
    assert allowed > 5
    assert halves.exceedance_by_noise == pytest.approx(betabinom.sf(20, 200, allowed + 0.5, 200 - allowed + 0.5))
