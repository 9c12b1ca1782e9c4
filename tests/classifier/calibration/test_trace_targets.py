"""Thresholds on populations of known risk: the promise holds at its confidence, not bought by always escalating."""

from __future__ import annotations

import numpy as np
from updraft.classifier.calibration.threshold_path import Thresholds, escalated
from updraft.classifier.calibration.trace_targets import CONFIDENCE, CascadeRows, choose_thresholds, simulate


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
