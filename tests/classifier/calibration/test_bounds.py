"""Bounds against their definitions, and on rows whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta
from updraft.classifier.arrays import Floats
from updraft.classifier.calibration.bounds import (
    max_losses,
    max_losses_on_average,
    mean_lower_bound,
    min_rows,
    stays_positive,
)


@pytest.mark.parametrize("n", [20, 60, 332, 2000])
@pytest.mark.parametrize("alpha", [0.02, 0.05, 0.1])
def test_as_bold_as_clopper_and_pearson_allow(n: int, alpha: float) -> None:
    most = max_losses(n, alpha, 0.1)
    assert most == -1 or beta.ppf(0.9, most + 1, n - most) <= alpha
    assert beta.ppf(0.9, most + 2, n - most - 1) > alpha


@pytest.mark.parametrize(
    ("n", "alpha", "most"), [(99, 0.05, 4), (98, 0.05, 3), (19, 0.05, 0), (18, 0.05, -1), (9, 0.0, -1)]
)
def test_allowed_losses_on_average(n: int, alpha: float, most: int) -> None:
    assert max_losses_on_average(n, alpha) == most
    assert (most + 1) / (n + 1) <= alpha or most == -1
    assert (most + 2) / (n + 1) > alpha


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.025])
@pytest.mark.parametrize("alpha", [0.05, 0.1])
def test_the_least_rows_are_enough_and_one_less_is_not(alpha: float, rate: float) -> None:
    n = min_rows(alpha, 0.1, rate)
    assert max_losses(n, alpha, 0.1) >= rate * n
    assert all(
        max_losses(fewer, alpha, 0.1) < rate * fewer or max_losses(fewer, alpha, 0.1) < 0 for fewer in range(1, n)
    )
    if rate == 0:
        assert (1 - alpha) ** n <= 0.1 < (1 - alpha) ** (n - 1), "the rule of 2.3 over alpha"


@pytest.mark.parametrize("n", [30, 332, 2000])
@pytest.mark.parametrize("mean", [0.0, 0.3, 0.86, 1.0])
def test_the_least_mean_is_a_little_below_the_exact_one(n: int, mean: float) -> None:
    hits = round(mean * n)
    least = mean_lower_bound(hits / n, n, 0.01)
    exact = float(beta.ppf(0.01, hits, n - hits + 1)) if hits else 0.0
    assert exact - 0.5 * (hits / n - exact) <= least <= exact + 1e-9


@pytest.mark.parametrize("mean", [0.1, 0.86, 0.99])
def test_the_least_mean_is_rarely_above_the_true_one(mean: float) -> None:
    """Also of scores between 0 and 1."""
    rng = np.random.default_rng(0)
    shown = rng.beta(2 * mean, 2 * (1 - mean), (4000, 60)).mean(axis=1), rng.binomial(60, mean, 4000) / 60
    for means in shown:
        wrong = np.mean([mean_lower_bound(float(each), 60, 0.1) > mean for each in means])
        assert wrong <= 0.1 + 3 * np.sqrt(0.1 * 0.9 / 4000)


def positive(slack: Floats, confidence: float, horizon: int) -> bool:
    mean, square = np.array([slack.mean()]), np.array([(slack**2).mean()])
    return bool(stays_positive(mean, square, len(slack), confidence, horizon)[0])


@pytest.mark.parametrize(("n", "risk"), [(300, 0.01), (1000, 0.02), (3000, 0.05)])
@pytest.mark.parametrize("confidence", [0.9, 0.99])
@pytest.mark.parametrize("surplus", [0.0, 1.0, 2.0])
def test_the_bound_is_wrong_no_more_often_than_stated(n: int, risk: float, confidence: float, surplus: float) -> None:
    """Rare losses of one whole point against a small steady gain: it says yes, and the next rows sum to a loss.

    `surplus`: how many standard errors the true mean lies above zero.
    """
    rng = np.random.default_rng(3)
    draws, horizon = 4000, 1000
    error = np.sqrt(risk * (1 - risk) * (1 / n + 1 / horizon))
    steady = (risk + surplus * error) / (1 - risk)
    ours, theirs = rng.binomial(n, risk, draws), rng.binomial(horizon, risk, draws)
    broken = (horizon - theirs) * steady < theirs
    said_yes = [positive(np.concatenate((np.full(k, -1.0), np.full(n - k, steady))), confidence, horizon) for k in ours]
    wrong = int((np.array(said_yes) & broken).sum())
    assert wrong / draws <= (1 - confidence) + 3 * np.sqrt((1 - confidence) * confidence / draws)


def test_the_bound_has_power() -> None:
    rng = np.random.default_rng(4)
    slack = np.where(rng.uniform(size=4000) < 0.03, -1.0, 0.05)
    assert positive(slack, 0.99, 2000)
    assert not positive(-slack, 0.99, 2000)


def test_a_shorter_horizon_needs_a_wider_margin() -> None:
    """The luck of few requests is larger: what is safe for many need not be safe for them."""
    rng = np.random.default_rng(5)
    slack = np.where(rng.uniform(size=4000) < 0.03, -1.0, 0.05)
    assert positive(slack, 0.99, 4000)
    assert not positive(slack, 0.99, 100)
