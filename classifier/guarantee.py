"""Risk control: the boldest threshold whose risk is promised to be at most alpha, and checks that the promise is kept.

The risk is the share of requests that stay local although only the cloud was right. There are two promises. With
*confidence*: a threshold is shown safe when the one-sided Clopper-Pearson bound on its risk is at most alpha at
confidence 1 - delta. Thresholds are tested in a fixed order, from the one that escalates everything on, and the walk
stops at the first that fails, so no correction for multiple tests is due (Angelopoulos et al., "Learn then Test",
2021). In the *mean* over calibrations: the boldest threshold with (losses + 1) / (n + 1) at most alpha (Angelopoulos
et al., "Conformal Risk Control", 2022). The risk only grows along the path, so both come to this: keep rows local in
rising order of P(gain) for as long as few enough of them are losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, floor, lgamma, log, log1p

import numpy as np

from .aim import Promise
from .metrics import Bools, Floats

__all__ = [
    "ALPHAS",
    "DELTA",
    "RULES",
    "HalfSplits",
    "Population",
    "Rule",
    "half_splits",
    "mean_threshold",
    "most_of",
    "most_on_average",
    "populations",
    "safe_threshold",
    "true_risks",
    "violation_rate",
]

# From P(gain) and gain, (n,) each, and alpha to the threshold to escalate above.
Rule = Callable[[Floats, Bools, float], float]

ALPHAS = (0.02, 0.05, 0.1)
DELTA = 0.1
NOTHING_LOCAL = -1.0
_DRAWS = 2_000
_ROWS = 500
_SPLITS = 400
_GRID = 200_001


def safe_threshold(p_gain: Floats, gain: Bools, alpha: float, delta: float = DELTA) -> float:
    """The threshold to escalate above, -1 if nothing may stay local. `p_gain` of models that were not fitted on `gain`.

    With probability at least 1 - delta over the n calibration rows, the true risk of "local where P(gain) is at or
    below the threshold" is at most alpha.
    """
    return _boldest(p_gain, gain, most_of(len(gain), alpha, delta))


def mean_threshold(p_gain: Floats, gain: Bools, alpha: float) -> float:
    """The same for a promise on average: the expected true risk, over calibrations of n rows, is at most alpha."""
    return _boldest(p_gain, gain, most_on_average(len(gain), alpha))


RULES: Mapping[Promise, Rule] = {"confidence": safe_threshold, "mean": mean_threshold}


def hindsight_threshold(p_gain: Floats, gain: Bools, alpha: float) -> float:
    """The boldest threshold whose observed risk on these very rows is at most alpha."""
    return _boldest(p_gain, gain, int(alpha * len(gain) + 1e-9))


def _boldest(p_gain: Floats, gain: Bools, losses: int) -> float:
    """The highest observed P(gain) at or below which at most `losses` rows are gains."""
    order = np.argsort(p_gain, kind="stable")
    values, lost = p_gain[order], np.cumsum(gain[order])
    # Equal values stay or go together, so only the last row of each is a threshold.
    ends = np.append(values[:-1] != values[1:], True)
    allowed = np.flatnonzero(ends & (lost <= losses))
    return float(values[allowed[-1]]) if len(allowed) else NOTHING_LOCAL


def most_of(n: int, alpha: float, delta: float) -> int:
    """The most k of n whose one-sided Clopper-Pearson bound is at most alpha: P(Binomial(n, alpha) <= k) <= delta.

    -1 if even none of n would not show it.
    """
    if alpha <= 0 or alpha >= 1:
        return -1 if alpha <= 0 else n
    chance, k = 0.0, -1
    while k < n:
        chance += exp(
            lgamma(n + 1) - lgamma(k + 2) - lgamma(n - k) + (k + 1) * log(alpha) + (n - k - 1) * log1p(-alpha)
        )
        if chance > delta:
            return k
        k += 1
    return n


def most_on_average(n: int, alpha: float) -> int:
    """The most k of n with (k + 1) / (n + 1) at most alpha, -1 if even none is too many: the next row may be lost."""
    return max(-1, floor(alpha * (n + 1) + 1e-9) - 1)


@dataclass(frozen=True, slots=True)
class Population:
    """Rows without end whose risk is known: `score` drawn from [0, 1], gain with chance `rate` of the score."""

    name: str
    scores: Floats
    rates: Floats

    def draw(self, rng: np.random.Generator, n: int) -> tuple[Floats, Bools]:
        rows = rng.integers(0, len(self.scores), n)
        return self.scores[rows], rng.random(n) < self.rates[rows]

    def risk(self, threshold: float) -> float:
        """The true risk of keeping everything at or below `threshold` local."""
        return float(np.where(self.scores <= threshold, self.rates, 0.0).mean())


def populations(seed: int = 0) -> list[Population]:
    """Shapes a score may have: honest, overconfident, useless, coarse, two heaps, and one that is surely wrong."""
    rng = np.random.default_rng(seed)
    even = rng.random(_GRID)
    skewed = rng.beta(0.6, 2.0, _GRID)
    heaps = np.where(rng.random(_GRID) < 0.7, rng.beta(2, 20, _GRID), rng.beta(8, 3, _GRID))
    return [
        Population("calibrated", even, even),
        Population("skewed", skewed, skewed),
        Population("overconfident", skewed, 0.1 + 0.6 * np.sqrt(skewed)),
        Population("useless", even, np.full(_GRID, 0.25)),
        Population("coarse", np.round(even * 8) / 8, 0.6 * np.round(even * 8) / 8),
        Population("heaps", heaps, heaps),
        Population("confidently wrong", skewed, np.where(skewed < 0.02, 0.15, 0.5 * skewed)),
    ]


def true_risks(
    population: Population, alpha: float, rule: Rule = safe_threshold, *, draws: int = _DRAWS, seed: int = 0
) -> Floats:
    """(draws,) the *true* risk of the threshold that `rule` takes from each of `draws` calibrations of 500 rows."""
    rng = np.random.default_rng(seed)
    ordered = np.argsort(population.scores, kind="stable")
    values = population.scores[ordered]
    risks = np.concatenate(([0.0], np.cumsum(population.rates[ordered]) / len(values)))
    chosen = [rule(*population.draw(rng, _ROWS), alpha) for _ in range(draws)]
    return risks[np.searchsorted(values, chosen, side="right")]


def violation_rate(
    population: Population, alpha: float, rule: Rule = safe_threshold, *, draws: int = _DRAWS, seed: int = 0
) -> float:
    """How often that risk exceeds alpha."""
    return float((true_risks(population, alpha, rule, draws=draws, seed=seed) > alpha).mean())


@dataclass(frozen=True, slots=True)
class HalfSplits:
    """Thresholds fitted on one half of the rows and judged on the other, averaged over many halvings.

    `exceedance`: how often the test half's own risk was above alpha; `exceedance_by_noise`: how often the luck of
    both halves would bring that about, given the losses of the first. `share`: of rows that go to the cloud.
    """

    alpha: float
    risk: float
    exceedance: float
    exceedance_by_noise: float
    share: float
    hindsight_share: float

    @property
    def share_over_hindsight(self) -> float:
        return self.share / self.hindsight_share if self.hindsight_share else float("nan")

    @property
    def always_over_hindsight(self) -> float:
        """The same for a router that sends everything up: what no useful one comes near."""
        return 1.0 / self.hindsight_share if self.hindsight_share else float("nan")


def half_splits(
    p_gain: Floats, gain: Bools, alpha: float, rule: Rule = safe_threshold, *, splits: int = _SPLITS
) -> HalfSplits:
    """Halve (p_gain, gain), both (n,), `splits` times; `rule` sees the one half only."""
    rng = np.random.default_rng(0)
    n, half = len(gain), len(gain) // 2
    found: list[tuple[float, float, float, float, float]] = []
    for _ in range(splits):
        order = rng.permutation(n)
        fit, test = order[:half], order[half:]
        threshold = rule(p_gain[fit], gain[fit], alpha)
        best = hindsight_threshold(p_gain[test], gain[test], alpha)
        risk = float((gain[test] & (p_gain[test] <= threshold)).mean())
        lost = int((gain[fit] & (p_gain[fit] <= threshold)).sum())
        noise = _chance_above(lost, half, len(test), alpha)
        shares = float((p_gain[test] > threshold).mean()), float((p_gain[test] > best).mean())
        found.append((risk, float(risk > alpha), noise, *shares))
    return HalfSplits(alpha, *(float(mean) for mean in np.mean(found, axis=0)))


def _chance_above(lost: int, n: int, drawn: int, alpha: float) -> float:
    """The chance that more than alpha of `drawn` further rows are lost after `lost` of `n` were (beta-binomial)."""
    a, b = lost + 0.5, n - lost + 0.5
    few = range(int(alpha * drawn + 1e-9) + 1)
    return 1.0 - sum(exp(_choose(drawn, k) + _log_beta(k + a, drawn - k + b) - _log_beta(a, b)) for k in few)


def _choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)
