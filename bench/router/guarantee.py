"""`updraft bench guarantee`: the true risk of routers that are fitted and calibrated on simulated populations.

Every run uses the steps of `updraft calibrate`, from features and grades to gates and thresholds (`fit_gates`,
`operating_point`). A population is a set of rows with a known P(gain). Runs draw rows with replacement, so the risk of
any thresholds is the mean over the set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.special import expit

from ...classifier.arrays import Floats
from ...classifier.calibration.operating_point import DELTA
from ...classifier.calibration.rows import CalibrationRows
from ...classifier.calibration.threshold_path import ThresholdPath, escalated
from ...classifier.features.blocks import BlockName, Mode
from ...classifier.features.feature_rows import FeatureRows
from ...classifier.features.wording import COUNTS, MEASURE_NAMES
from ...classifier.training.gates import FittedGates, TrainingData, fit_gates
from ...classifier.training.router_model import Labels
from .coverage import ALPHAS, Rule, graded, promised

ROWS = (150, 400, 2_000)
_SIZE = 10_000
_KINDS, _WORDS_OF_KIND, _OWN_WORDS, _WORDS, _TAIL, _SIGNALS = 12, 20, 4, 20, 3_000, 8

# Key of a result: a name in `GATES`, and alpha.
Setup = tuple[str, float]
# Combinations of gates to test, by name.
GATES: dict[str, tuple[Mode, ...]] = {
    "gate 1": ("prompt",),
    "gates 1, 3": ("prompt", "cascade"),
    "gates 1, 2, 3": ("prompt", "opening", "cascade"),
}


@dataclass(frozen=True, slots=True)
class SimulatedPopulation:
    """An infinite population drawn from k rows; in each, the cloud is better with probability `rates`, (k,)."""

    name: str
    features: Mapping[Mode, FeatureRows]
    rates: Floats

    def draw(self, rng: np.random.Generator, n: int) -> TrainingData:
        """Draw `n` graded rows. The cloud is always right; the device is right in all rows without a gain."""
        rows = rng.integers(0, len(self.rates), n)
        gain = rng.random(n) < self.rates[rows]
        features: dict[Mode, FeatureRows] = {mode: gate_rows.take(rows) for mode, gate_rows in self.features.items()}
        labels = Labels.of(np.where(gain, 0.0, 1.0), np.ones(n))
        return TrainingData(features, labels, (np.ones(n), np.ones(n), False), np.ones(n, np.bool_))


def populations(seed: int = 0) -> list[SimulatedPopulation]:
    """Create three populations that differ in the distribution of P(gain). A few words of each prompt reveal its kind,
    and some kinds are hard for the device. Signals of the answer inform gate 2 weakly and gate 3 strongly. In the last
    population, the signals mislead in a fifth of the rows.
    """
    rng = np.random.default_rng(seed)
    kinds, signal = rng.integers(0, _KINDS, _SIZE), rng.normal(size=_SIZE)
    hard = kinds < _KINDS // 4
    scenarios = {
        "separable": expit(np.where(hard, 1.2, -5.0) + 1.5 * signal),
        "noisy": expit(np.where(hard, -0.5, -2.0) + 0.5 * signal),
        "confidently wrong": np.where(
            rng.random(_SIZE) < 0.2, expit(-1.5 - 1.5 * signal), expit(np.where(hard, 1.0, -4.0) + signal)
        ),
    }
    features = _features(rng, kinds, signal)
    return [SimulatedPopulation(name, features, rates) for name, rates in scenarios.items()]


def _features(rng: np.random.Generator, kinds: NDArray[Any], signal: Floats) -> dict[Mode, FeatureRows]:
    """Draw features: a few words of a prompt depend on its kind, the others are random; measures are noise."""
    n = len(kinds)
    tail = rng.integers(0, _TAIL, (n, _WORDS - _OWN_WORDS))
    own = _TAIL + kinds[:, None] * _WORDS_OF_KIND + rng.integers(0, _WORDS_OF_KIND, (n, _OWN_WORDS))
    words = np.hstack((tail, own))
    starts = np.arange(0, words.size + 1, _WORDS)
    counts = csr_matrix((np.ones(words.size, np.float32), words.ravel(), starts), shape=(n, COUNTS))
    counts.sum_duplicates()
    wording = rng.normal(size=(n, len(MEASURE_NAMES)))
    plain, dim = (rng.normal(size=(n, _SIGNALS)) for _ in range(2))
    plain[:, :3] = signal[:, None] + 0.3 * plain[:, :3]
    dim[:, :3] = signal[:, None] + 1.5 * dim[:, :3]
    blocks_of_mode: dict[Mode, dict[BlockName, NDArray[Any]]] = {
        "prompt": {"wording": wording},
        "opening": {"wording": wording, "opening": dim},
        "cascade": {"wording": wording, "signals": plain},
    }
    return {
        mode: FeatureRows(counts, {name: block.astype(np.float32) for name, block in blocks.items()})
        for mode, blocks in blocks_of_mode.items()
    }


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The result of one calibration: its true risk and cloud share, and the least cloud share allowed in hindsight."""

    risk: float
    share: float
    hindsight: float


@dataclass(frozen=True, slots=True)
class Procedure:
    """Steps that turn rows into gates and thresholds. The defaults are those of the shipped policy."""

    members: Sequence[str] = ("ridge",)
    fit: Callable[[TrainingData, int, Sequence[str]], FittedGates] = fit_gates
    rule: Callable[[float], Rule] = promised


def simulate(
    population: SimulatedPopulation, rows: int, runs: int, procedure: Procedure | None = None
) -> Iterator[dict[Setup, SimulatedRun]]:
    """Yield each run's results, keyed by (names of the gates, alpha). The same arguments give the same results."""
    procedure = procedure or Procedure()
    rng = np.random.default_rng(rows)
    arrangements = {name: modes for name, modes in GATES.items() if population.features.keys() >= set(modes)}
    for run in range(runs):
        gates = procedure.fit(population.draw(rng, rows), run, procedure.members)
        judged = {mode: router.probability(population.features[mode]) for mode, router in gates.routers.items()}
        whole = graded(population.rates > 0, judged["prompt"], judged.get("opening"), judged.get("cascade"))
        results: dict[Setup, SimulatedRun] = {}
        for name, modes in arrangements.items():
            known, true = (_with_modes(each, modes) for each in (gates.calibration, whole))
            path = ThresholdPath.of(true)
            risks = path.sums(population.rates) / len(population.rates)
            for alpha in ALPHAS:
                up, best = escalated(true, procedure.rule(alpha)(known)), escalated(true, path.walk(risks <= alpha))
                risk = float(np.where(up, 0.0, population.rates).mean())
                results[name, alpha] = SimulatedRun(risk, float(up.mean()), float(best.mean()))
        yield results


def measure(runs: int, say: Callable[[str], None], procedure: Procedure | None = None) -> dict[str, Any]:
    """Return figures nested by population, number of rows, combination of gates, and alpha."""
    results: dict[str, Any] = {"limit": limit_of_violations(runs)}
    for population in populations():
        of_rows: dict[str, Any] = {}
        for rows in ROWS:
            outcomes = list(simulate(population, rows, runs, procedure))
            of_gates: dict[str, dict[str, Any]] = {}
            for name, alpha in outcomes[0]:
                of_gates.setdefault(name, {})[f"alpha {alpha:g}"] = figures(
                    [run[name, alpha] for run in outcomes], alpha
                )
            of_rows[f"{rows} rows"] = of_gates
            worst = max(cell["violations"] for cells in of_gates.values() for cell in cells.values())
            say(f"{population.name}, {rows} rows: violations at most {worst:.3f}, limit {results['limit']:.3f}")
        results[population.name] = of_rows
    return results


def limit_of_violations(runs: int) -> float:
    """Return the highest violation rate to expect in `runs` at a true rate of delta: delta plus two standard errors."""
    return DELTA + 2 * sqrt(DELTA * (1 - DELTA) / runs)


def figures(outcomes: Sequence[SimulatedRun], alpha: float) -> dict[str, float]:
    """Summarise runs. `violations`: share with a risk above alpha; `above_hindsight`: share escalated needlessly."""
    risks, shares, hindsight = np.array([(run.risk, run.share, run.hindsight) for run in outcomes]).T
    return {
        "violations": float((risks > alpha).mean()),
        "risk": float(risks.mean()),
        "cloud_share": float(shares.mean()),
        "above_hindsight": float((shares - hindsight).mean()),
    }


def _with_modes(rows: CalibrationRows, modes: Sequence[Mode]) -> CalibrationRows:
    return replace(
        rows, during=rows.during if "opening" in modes else None, after=rows.after if "cascade" in modes else None
    )
