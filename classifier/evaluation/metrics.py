"""Metrics of predicted probabilities: ranking (AUROC), calibration error, reliability, bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import Bools
from ..optional_imports import load_module

ECE_BINS = 15


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """A group of rows with similar predicted probability."""

    count: int
    # Mean predicted probability.
    predicted: float
    # Share of positive rows.
    observed: float


def auroc(scores: NDArray[Any], positive: Bools) -> float:
    """Return the chance that a positive row outscores a negative one, ties counting half; NaN if a class is missing."""
    if positive.all() or not positive.any():
        return float("nan")
    return float(load_module("sklearn.metrics", "calibrate").roc_auc_score(positive, scores))


def reliability(probabilities: NDArray[Any], outcomes: NDArray[Any], bins: int = ECE_BINS) -> list[ReliabilityBin]:
    """Group rows into equal-mass bins of predicted probability (at most `bins`, no empty bin), lowest first."""
    p = np.asarray(probabilities, np.float64)
    y = np.asarray(outcomes, np.float64)
    order = np.argsort(p, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    return [ReliabilityBin(len(part), float(p[part].mean()), float(y[part].mean())) for part in parts]


def ece(probabilities: NDArray[Any], outcomes: NDArray[Any], bins: int = ECE_BINS) -> float:
    """Return the expected calibration error: mean |predicted - observed| over equal-mass bins, weighted by size."""
    table = reliability(probabilities, outcomes, bins)
    return sum(b.count * abs(b.predicted - b.observed) for b in table) / max(1, sum(b.count for b in table))


def ece_by_chance(probabilities: NDArray[Any], bins: int = ECE_BINS, *, draws: int = 200, seed: int = 0) -> float:
    """Return the mean calibration error that perfectly calibrated probabilities with these values would show."""
    p = np.asarray(probabilities, np.float64)
    rng = np.random.default_rng(seed)
    return float(np.mean([ece(p, rng.random(len(p)) < p, bins) for _ in range(draws)]))


def bootstrap(
    statistic: Callable[[NDArray[np.int64]], float], n: int, *, draws: int = 400, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile interval of `statistic(rows)` over `draws` resamples of `n` rows, ignoring NaN."""
    rng = np.random.default_rng(seed)
    values = np.array([statistic(rng.integers(0, n, n)) for _ in range(draws)])
    values = values[np.isfinite(values)]
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
