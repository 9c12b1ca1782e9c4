"""Confidence bounds on a rate or a mean, from n observed rows."""

from __future__ import annotations

from math import exp, floor, lgamma, log, log1p
from statistics import NormalDist

import numpy as np

from ..arrays import Bools, Floats


def max_losses(n: int, alpha: float, delta: float) -> int:
    """Return the most losses in n rows that still prove a loss rate of at most alpha at level 1 - delta.

    By Clopper-Pearson, this is the largest k with P(Binomial(n, alpha) <= k) <= delta, or -1 if there is no such k.
    """
    if alpha <= 0 or alpha >= 1:
        return -1 if alpha <= 0 else n
    chance = 0.0
    for k in range(n + 1):
        chance += exp(lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1) + k * log(alpha) + (n - k) * log1p(-alpha))
        if chance > delta:
            return k - 1
    return n


def max_losses_on_average(n: int, alpha: float) -> int:
    """Return the largest number k of losses in n rows with (k + 1) / (n + 1) <= alpha, or -1 if no k fits."""
    return max(-1, floor(alpha * (n + 1) + 1e-9) - 1)


def min_rows(alpha: float, delta: float, rate: float = 0.0) -> int:
    """Return the smallest n for which `max_losses` allows n * rate losses. `rate`: expected loss rate, below alpha."""
    n, lost = 1, 0
    while True:
        while max_losses(n, alpha, delta) < lost:
            n += 1
        if lost >= rate * n:
            return n
        lost += 1


def mean_lower_bound(mean: float, n: int, delta: float) -> float:
    """Return a lower bound on the true mean at level 1 - delta, given `n` rows in [0, 1] with the mean `mean`.

    Uses the divergence form of Hoeffding's bound (1963, theorem 1); close to Clopper-Pearson if all rows are 0 or 1.
    """
    low, high = 0.0, mean
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if n * _divergence(mean, middle) > log(1 / delta) else (low, middle)
    return low


def _divergence(one: float, other: float) -> float:
    """Return the Kullback-Leibler divergence of two Bernoulli distributions."""
    pairs = (one, other), (1.0 - one, 1.0 - other)
    return sum(p * log(p / q) for p, q in pairs if p > 0)


def stays_positive(mean: Floats, square: Floats, n: int, level: float, horizon: int) -> Bools:
    """Return whether the mean of `horizon` further rows will be above zero with probability `level`, predicted
    from `n` independent rows in [-1, 1] with this mean and mean square. Works elementwise on arrays of any shape.

    The plain normal prediction bound is too optimistic if losses are rare. Two corrections are therefore made: one row
    with the worst value, -1, is added, and the Cornish-Fisher term allows for the skew of a rare loss.
    """
    z = NormalDist().inv_cdf(level)
    mean, square = (n * mean - 1.0) / (n + 1), (n * square + 1.0) / (n + 1)
    past_share, future_share = 1.0 / (n + 1), 1.0 / horizon
    skew = max(0.0, z * z - 1.0) / 3.0 * (past_share + future_share)
    return mean - z * np.sqrt(np.maximum(square - mean**2, 0.0) * (past_share + future_share)) - skew > 0.0
