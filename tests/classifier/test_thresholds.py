"""Thresholds on populations of known risk: the promise holds at its confidence, not bought by always escalating."""

from __future__ import annotations

import numpy as np
import pytest
from updraft.classifier.thresholds import (
    CONFIDENCE,
    CascadeRows,
    Thresholds,
    choose_thresholds,
    escalated,
    simulate,
    stays_positive,
)


def known_risk(n: int, rng: np.random.Generator, sharpness: float = 1.5) -> CascadeRows:
    """Rows whose P(gain) is exact at gate 3 and noisier before it."""
    logit = rng.normal(-0.8, sharpness, n)
    gain = rng.uniform(size=n) < 1 / (1 + np.exp(-logit))
    cloud = np.where(gain, 1.0, (rng.uniform(size=n) < 0.9).astype(float))
    local = np.where(gain, 0.0, np.where(rng.uniform(size=n) < 0.97, cloud, 1.0))
    before, during = (1 / (1 + np.exp(-(logit + rng.normal(0, noise, n)))) for noise in (1.5, 0.8))
    return CascadeRows(before, during, 1 / (1 + np.exp(-logit)), local, cloud)


def test_targets_are_met_at_the_stated_confidence_and_not_by_escalating_everything() -> None:
    rng = np.random.default_rng(0)
    population = known_risk(60_000, rng)
    targets = (0.9, 0.98)
    draws = 50
    broken = dict.fromkeys(targets, 0)
    shares: dict[float, list[float]] = {quality: [] for quality in targets}
    for _ in range(draws):
        for target in choose_thresholds(known_risk(3000, rng), targets, confidence=0.9):
            found = simulate(population, target.thresholds)
            broken[target.quality] += found.quality < target.quality
            shares[target.quality].append(found.cloud_share)
    # At most 10 % may break; 50 draws allow some more by chance (99 % point of the binomial).
    assert max(broken.values()) <= 10
    for quality in targets:
        assert np.mean(shares[quality]) < 1.15 * hindsight_share(population, quality) + 0.02


def hindsight_share(rows: CascadeRows, quality: float) -> float:
    """The least share with which gate 3 alone meets the target when the true risk is known."""
    for level in np.quantile(rows.after, np.linspace(1, 0, 400)):
        found = simulate(rows, Thresholds(1.0, 1.0, float(level)))
        if found.quality >= quality:
            return found.cloud_share
    return 1.0


def test_stricter_targets_escalate_more_and_early_gates_waste_little() -> None:
    rows = known_risk(5000, np.random.default_rng(1))
    found = choose_thresholds(rows)
    shares = [target.cloud_share for target in found]
    assert shares == sorted(shares)
    for target in found[:-1]:
        alone = simulate(rows, Thresholds(1.0, 1.0, target.thresholds.after))
        assert alone.cloud_share <= target.cloud_share <= alone.cloud_share + 0.02 + 1e-9
        assert target.predicted_quality >= target.quality
        assert target.confidence == CONFIDENCE
    middle = found[2]
    assert middle.before_share > 0.02
    assert middle.during_share > 0.02


def test_what_cannot_be_shown_escalates_everything() -> None:
    rng = np.random.default_rng(2)
    p = rng.uniform(size=(3, 30))
    rows = CascadeRows(p[0], p[1], p[2], np.zeros(30), np.ones(30))
    for target in choose_thresholds(rows, (0.98, 1.0)):
        assert escalated(rows, target.thresholds).all()
        assert target.predicted_quality == 1.0


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
    said_yes = [
        stays_positive(np.concatenate((np.full(k, -1.0), np.full(n - k, steady))), confidence, horizon) for k in ours
    ]
    wrong = int((np.array(said_yes) & broken).sum())
    assert wrong / draws <= (1 - confidence) + 3 * np.sqrt((1 - confidence) * confidence / draws)


def test_the_bound_has_power() -> None:
    rng = np.random.default_rng(4)
    slack = np.where(rng.uniform(size=4000) < 0.03, -1.0, 0.05)
    assert stays_positive(slack, 0.99, 2000)
    assert not stays_positive(-slack, 0.99, 2000)


def test_a_shorter_horizon_needs_more_room() -> None:
    """The luck of few requests is larger: what is safe for many need not be safe for them."""
    rng = np.random.default_rng(5)
    slack = np.where(rng.uniform(size=4000) < 0.03, -1.0, 0.05)
    assert stays_positive(slack, 0.99, 4000)
    assert not stays_positive(slack, 0.99, 100)
