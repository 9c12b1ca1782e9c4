"""The promise of what ships, end to end: fit, calibrate, then the true risk; and wrong routers are found out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from updraft.bench.router.guarantee import (
    GATES,
    Procedure,
    SimulatedPopulation,
    figures,
    limit_of_violations,
    populations,
    simulate,
)
from updraft.classifier.calibration.threshold_path import ALWAYS, NEVER, Thresholds
from updraft.classifier.training.gates import FittedGates, TrainingData, calibrated
from updraft.classifier.training.router_model import fit_router

pytestmark = pytest.mark.slow
ROWS, ALPHA = 400, 0.1
RUNS = pytest.mark.parametrize("runs", [12, pytest.param(30, marks=pytest.mark.soak)])
FEW = 3  # where every run ends alike
# Of all requests: how many more than in hindsight a useful router may send up.
MAX_ABOVE_HINDSIGHT = 0.2


@pytest.fixture(scope="module")
def separable() -> SimulatedPopulation:
    """By gate 1 alone, which is quick to fit."""
    population = populations()[0]
    return replace(population, features={"prompt": population.features["prompt"]})


def measured(population: SimulatedPopulation, procedure: Procedure | None, runs: int) -> dict[str, float]:
    runs_of = simulate(population, ROWS, runs, procedure)
    return figures([run["gate 1", ALPHA] for run in runs_of], ALPHA)


def former(material: TrainingData, seed: int, members: Sequence[str]) -> FittedGates:
    """Thresholds from P(gain) by members that did not see the row, for gates that did."""
    labels, rows, n = material.labels, material.features["prompt"], len(material.labels.weak)
    router = fit_router(rows, labels, None, seed, members)
    x, folds, scores = router.topics.prepare(rows).x, np.random.default_rng(seed).permutation(n) % 5, np.zeros(n)
    for fold in range(5):
        held, kept = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
        scores[held] = router.refitted(rows.take(kept), labels.take(kept), seed).blended(x[held])
    p_gain = np.clip(router.curve(scores), 0.0, 1.0)
    return FittedGates({"prompt": router}, np.arange(n), calibrated({"prompt": p_gain}, material, np.arange(n)))


@RUNS
def test_shipped_procedure_keeps_its_promise_and_saves_calls(separable: SimulatedPopulation, runs: int) -> None:
    outcome = measured(separable, None, runs)
    assert outcome["violations"] <= limit_of_violations(runs)
    assert outcome["above_hindsight"] < MAX_ABOVE_HINDSIGHT
    assert 0.5 * ALPHA < outcome["risk"] <= ALPHA, "what may be lost is used"


@RUNS
def test_gates_two_and_three_leave_the_promise_as_it_is(runs: int) -> None:
    confidently_wrong = populations()[2]
    simulated = list(simulate(confidently_wrong, ROWS, runs))
    for name in GATES:
        outcome = figures([run[name, ALPHA] for run in simulated], ALPHA)
        assert outcome["violations"] <= limit_of_violations(runs), name


@RUNS
def test_the_former_procedure_breaks_its_promise(separable: SimulatedPopulation, runs: int) -> None:
    assert measured(separable, Procedure(fit=former), runs)["violations"] > 2 * limit_of_violations(30)


def test_a_router_that_always_escalates_is_of_no_use(separable: SimulatedPopulation) -> None:
    outcome = measured(separable, always(ALWAYS), FEW)
    assert outcome["violations"] == 0
    assert outcome["above_hindsight"] > 2 * MAX_ABOVE_HINDSIGHT


def test_a_router_that_never_escalates_breaks_its_promise(separable: SimulatedPopulation) -> None:
    outcome = measured(separable, always(NEVER), FEW)
    assert outcome["violations"] == 1
    assert outcome["above_hindsight"] < 0


def always(threshold: float) -> Procedure:
    """The same gates under thresholds that look at no row."""
    return Procedure(rule=lambda _alpha: lambda _rows: Thresholds(threshold, NEVER, threshold))
