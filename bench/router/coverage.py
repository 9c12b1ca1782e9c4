"""Checks calibrated guarantees against populations of known risk, and on halves of graded rows.

The tested code is `operating_point`, which computes a router's thresholds from rows. In these rows the cloud is always
right. The risk is the share of requests that stay local although only the cloud was right. A quality target of 1 -
alpha promises a risk of at most alpha. The promise `no-loss` is broken if the *true* risk exceeds alpha. The promise
`mean` (decision 034) is broken if the mean true risk of many calibrations exceeds alpha.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import betabinom

from ...classifier.arrays import Bools, Floats
from ...classifier.calibration.operating_point import DELTA, operating_point
from ...classifier.calibration.rows import CalibrationRows
from ...classifier.calibration.threshold_path import ThresholdPath, Thresholds, escalated
from ...classifier.target import Promise, Target

Rule = Callable[[CalibrationRows], Thresholds]

ALPHAS = (0.02, 0.05, 0.1)
_ROWS = 500
_SPLITS = 400
_NET_SPLITS = 100
_GRID = 20_001


def promised(alpha: float, promise: Promise = "no-loss") -> Rule:
    """Return the rule that computes the thresholds of a router that promises a risk of at most `alpha`."""
    target = Target("quality", 1.0 - alpha, promise=promise)
    return lambda rows: operating_point(rows, target, DELTA).thresholds


def hindsight(alpha: float) -> Rule:
    """Return the rule that computes thresholds with the fewest escalations at an observed risk of at most `alpha`."""

    def rule(rows: CalibrationRows) -> Thresholds:
        path = ThresholdPath.of(rows)
        return path.walk(path.sums(rows.gain) <= alpha * len(rows.gain) + 1e-9)

    return rule


def graded(gain: Bools, before: Floats, during: Floats | None = None, after: Floats | None = None) -> CalibrationRows:
    """Build n rows in which the cloud is always right, and the device is right where `gain` (n,) is false."""
    ones = np.ones(len(gain))
    return CalibrationRows(before, after, np.where(gain, 0.0, ones), ones, ones, ones, during)


@dataclass(frozen=True, slots=True)
class Population:
    """An infinite population of known risk: k kinds of rows, each with gate scores and with the probability `rates`,
    (k,), that the cloud is better.
    """

    name: str
    rates: Floats
    before: Floats
    during: Floats | None = None
    after: Floats | None = None

    def draw(self, rng: np.random.Generator, n: int) -> CalibrationRows:
        rows = rng.integers(0, len(self.rates), n)
        gates = (None if gate is None else gate[rows] for gate in (self.during, self.after))
        return graded(rng.random(n) < self.rates[rows], self.before[rows], *gates)

    def risk(self, thresholds: Thresholds) -> float:
        """Return the true risk under `thresholds`."""
        return float(np.where(escalated(self, thresholds), 0.0, self.rates).mean())


def populations(seed: int = 0) -> list[Population]:
    """Create populations with calibrated, skewed, overconfident, useless, coarse, bimodal and confidently wrong scores.
    Each has two versions: a single gate with this score, and gate 3 with this score after two less informed gates.
    """
    rng = np.random.default_rng(seed)
    even = rng.random(_GRID)
    skewed = rng.beta(0.6, 2.0, _GRID)
    heaps = np.where(rng.random(_GRID) < 0.7, rng.beta(2, 20, _GRID), rng.beta(8, 3, _GRID))
    coarse = np.round(even * 8) / 8
    shapes = {
        "calibrated": (even, even),
        "skewed": (skewed, skewed),
        "overconfident": (skewed, 0.1 + 0.6 * np.sqrt(skewed)),
        "useless": (even, np.full(_GRID, 0.25)),
        "coarse": (coarse, 0.6 * coarse),
        "heaps": (heaps, heaps),
        "confidently wrong": (skewed, np.where(skewed < 0.02, 0.15, 0.5 * skewed)),
    }
    built: list[Population] = []
    for name, (score, rates) in shapes.items():
        before, during = (known * score + (1 - known) * rng.permutation(score) for known in (0.5, 0.75))
        built.append(Population(name, rates, score))
        built.append(Population(f"{name} by three gates", rates, before, during, score))
    return built


def true_risks(population: Population, rule: Rule, *, draws: int, seed: int = 0) -> Floats:
    """Return the *true* risk of `rule`'s thresholds for each of `draws` calibrations of 500 rows, (draws,)."""
    rng = np.random.default_rng(seed)
    return np.array([population.risk(rule(population.draw(rng, _ROWS))) for _ in range(draws)])


@dataclass(frozen=True, slots=True)
class HalfSplits:
    """Averages over many random halvings of the rows: thresholds fitted on one half, tested on the other."""

    alpha: float
    risk: float
    # Share of halvings in which the test half's observed risk exceeds alpha.
    exceedance: float
    # Exceedance to expect from sampling noise alone, given the number of lost requests in the first half.
    exceedance_by_noise: float
    # Share of test rows that go to the cloud.
    share: float
    hindsight_share: float

    @property
    def share_over_hindsight(self) -> float:
        return self.share / self.hindsight_share if self.hindsight_share else float("nan")

    @property
    def cloud_only_over_hindsight(self) -> float:
        """The value of `share_over_hindsight` for a router that escalates everything; useful routers are far below."""
        return 1.0 / self.hindsight_share if self.hindsight_share else float("nan")


def half_splits(p_gain: Floats, gain: Bools, alpha: float, rule: Rule, *, splits: int = _SPLITS) -> HalfSplits:
    """Split (p_gain, gain), both (n,), in halves `splits` times; `rule` sees only the first half."""
    rng = np.random.default_rng(0)
    n, half = len(gain), len(gain) // 2
    outcomes: list[tuple[float, float, float, float, float]] = []
    for _ in range(splits):
        order = rng.permutation(n)
        fit, test = (graded(gain[rows], p_gain[rows]) for rows in (order[:half], order[half:]))
        thresholds = rule(fit)
        up = escalated(test, thresholds)
        risk = float((test.gain & ~up).mean())
        lost = int((fit.gain & ~escalated(fit, thresholds)).sum())
        best = escalated(test, hindsight(alpha)(test))
        noise = _chance_above(lost, half, n - half, alpha)
        outcomes.append((risk, float(risk > alpha), noise, float(up.mean()), float(best.mean())))
    return HalfSplits(alpha, *(float(mean) for mean in np.mean(outcomes, axis=0)))


def net_splits(p_gain: Floats, weak: Floats, strong: Floats, quality: float, *, rows: int = 1_000) -> dict[str, float]:
    """Calibrate a net `quality` on up to `rows` random rows, and test it on at least half of the rows, many times.

    All arrays are (n,). Returns the share of runs whose test rows score below the quality, their mean net quality, and
    their mean cloud share.
    """
    rng, n = np.random.default_rng(0), len(p_gain)
    target, some = Target("quality", quality, promise="net"), min(rows, n // 2)
    outcomes: list[tuple[float, float, float]] = []
    for _ in range(_NET_SPLITS):
        fit, test = np.split(rng.permutation(n), [some])
        ones = np.ones(some)
        known = CalibrationRows(p_gain[fit], None, weak[fit], strong[fit], ones, ones)
        up = p_gain[test] > operating_point(known, target, DELTA).thresholds.before
        kept = float(np.where(up, strong[test], weak[test]).mean() / strong[test].mean())
        outcomes.append((float(kept < quality), kept, float(up.mean())))
    broken, kept, share = np.mean(outcomes, axis=0).tolist()
    return {"broken": broken, "quality": kept, "cloud_share": share}


def _chance_above(lost: int, n: int, drawn: int, alpha: float) -> float:
    """Return the probability that more than alpha of `drawn` new rows are lost, if `lost` of `n` rows were lost."""
    few = np.arange(int(alpha * drawn + 1e-9) + 1)
    return 1.0 - float(betabinom.pmf(few, drawn, lost + 0.5, n - lost + 0.5).sum())
