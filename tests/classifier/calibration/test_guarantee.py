"""The promise of what ships, end to end: fit, calibrate, then the true risk; and wrong routers are found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from updraft.bench.guarantee import (
    Outcome,
    Population,
    Procedure,
    populations,
    simulate,
)
from updraft.classifier.training.gates import FittedGates, Material, calibrated
from updraft.classifier.training.router_model import fit_router

RUNS, ROWS = 100, 400
# How many more requests than in hindsight a useful router may send up at alpha 10 %.
MOST_ABOVE_HINDSIGHT = 0.25


@pytest.fixture(scope="module")
def separable() -> Population:
    """By gate 1 alone, which is quick to fit."""
    found = populations()[0]
    return replace(found, features={"prompt": found.features["prompt"]})


def outcomes(population: Population, alpha: float, procedure: Procedure | None = None) -> list[Outcome]:
    return [run["gate 1", alpha] for run in simulate(population, ROWS, RUNS, procedure)]


def former(material: Material, seed: int, candidates: Mapping[str, tuple[str, ...]]) -> FittedGates:
    """Thresholds from P(gain) by members that did not see the row, for gates that did."""
    labels, rows, n = material.labels, material.features["prompt"], len(material.labels.weak)
    router = fit_router(rows, labels, None, seed, candidates)
    x, folds, scores = router.topics.prepare(rows), np.random.default_rng(seed).permutation(n) % 5, np.zeros(n)
    for fold in range(5):
        held, kept = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
        members = fit_router(rows.take(kept), labels.take(kept), router.topics, seed, candidates).members
        scores[held] = replace(router, members=members).blended(x[held])
    p_gain = np.clip(router.curve(scores), 0.0, 1.0)
    return FittedGates({"prompt": router}, np.arange(n), calibrated({"prompt": p_gain}, material, np.arange(n)))
