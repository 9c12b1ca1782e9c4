"""Calibration of raw scores to probabilities: a smooth monotone curve that fits into three ONNX nodes.

Isotonic rates over equal-mass bins are shrunk towards a Platt sigmoid by a few pseudo-rows. The sigmoid keeps the curve
strictly rising, so that distinct scores between the outer knots stay distinct.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Bools, Floats
from ..optional_imports import load_module

_BINS = 20
_PSEUDO_ROWS = 30.0
_MIN_ROWS_PER_BIN = 40
_MIN_STEP = 0.05


@dataclass(frozen=True, slots=True)
class ProbabilityCurve:
    """A piecewise linear curve, constant outside its knots: `low + clip((score - starts) / widths, 0, 1) @ rises`."""

    low: float
    starts: Floats
    widths: Floats
    rises: Floats

    def __call__(self, scores: Floats) -> Floats:
        return self.low + np.clip((scores[:, None] - self.starts) / self.widths, 0.0, 1.0) @ self.rises


def fit_curve(scores: Floats, positive: Bools) -> ProbabilityCurve:
    """Fit a curve that maps held-out `scores` to the share of `positive` rows."""
    slope, offset = fit_platt(scores, positive)
    bins = int(np.clip(len(scores) // _MIN_ROWS_PER_BIN, 1, _BINS))
    order = np.argsort(scores, kind="stable")
    parts = np.array_split(order, bins)
    counts = np.array([len(part) for part in parts], np.float64)
    isotonic = load_module("sklearn.isotonic", "calibrate").isotonic_regression
    rates = np.asarray(isotonic([float(positive[part].mean()) for part in parts], sample_weight=counts), np.float64)
    middles = np.array([scores[part].mean() for part in parts])
    chosen = _spread(middles)
    middles, rates = middles[chosen], rates[chosen]
    # The outer knots cover all observed scores, so that the most and least certain rows keep their order.
    x = np.concatenate(([scores.min() - _MIN_STEP], middles, [scores.max() + _MIN_STEP]))
    trust = counts.mean() / (counts.mean() + _PSEUDO_ROWS)
    y = trust * np.concatenate((rates[:1], rates, rates[-1:])) + (1 - trust) * _sigmoid(slope * x + offset)
    return ProbabilityCurve(float(y[0]), x[:-1], np.diff(x), np.diff(y))


def fit_platt(scores: Floats, positive: Bools) -> tuple[float, float]:
    """Fit a sigmoid by log loss, with targets smoothed as in Platt (2000). Return its slope and offset.

    The slope is kept positive, so that a useless score yields an almost flat curve and not a falling curve.
    """
    n_positive, n = int(positive.sum()), len(positive)
    target = np.where(positive, (n_positive + 1) / (n_positive + 2), 1 / (n - n_positive + 2))
    centre, scale = float(scores.mean()), float(scores.std()) or 1.0
    # Each row appears twice: as a positive weighted by its smoothed target, and as a negative weighted by 1 - target.
    standard, labels = np.tile((scores - centre) / scale, 2)[:, None], np.repeat((1, 0), n)
    logistic = load_module("sklearn.linear_model", "calibrate").LogisticRegression(C=1e6, solver="newton-cholesky")
    logistic.fit(standard, labels, sample_weight=np.concatenate((target, 1 - target)))
    slope = max(float(logistic.coef_[0, 0]) / scale, 1e-3)
    return slope, float(logistic.intercept_[0]) - slope * centre


def _sigmoid(x: Floats) -> Floats:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _spread(x: Floats) -> list[int]:
    """Return indices of knots at least `_MIN_STEP` apart, because steep segments would magnify float32 rounding."""
    keep = [0]
    for i in range(1, len(x)):
        if x[i] - x[keep[-1]] >= _MIN_STEP:
            keep.append(i)
    return keep
