"""Thresholds come from rows that no gate has seen, nor their wording, nor rows that ask the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from updraft.bench.router.guarantee import SimulatedPopulation, populations
from updraft.classifier.arrays import Floats
from updraft.classifier.features.blocks import Mode
from updraft.classifier.features.feature_rows import FeatureRows
from updraft.classifier.training.gates import TrainingData, fit_gates, split_rows
from updraft.classifier.training.router_model import Labels
from updraft.protocol.errors import InvalidRequestError

N = 240


@pytest.fixture(scope="module")
def population() -> SimulatedPopulation:
    return populations()[0]


@pytest.fixture(scope="module")
def material(population: SimulatedPopulation) -> TrainingData:
    return population.draw(np.random.default_rng(3), N)


def test_held_out_rows_do_not_affect_gates(population: SimulatedPopulation, material: TrainingData) -> None:
    fitting, held_out = split_rows(material.labels, 0)
    assert sorted([*fitting, *held_out]) == [*range(N)]
    others, labels = population.draw(np.random.default_rng(4), N), material.labels
    kept = np.isin(np.arange(N), fitting)
    rows = np.where(kept, np.arange(N), N + np.arange(N))

    def mixed(mode: Mode) -> FeatureRows:
        one, two = material.features[mode], others.features[mode]
        return FeatureRows(
            stacked(one, two), {name: np.vstack((one.blocks[name], two.blocks[name])) for name in one.blocks}
        ).take(rows)

    changed = replace(
        material,
        features={mode: mixed(mode) for mode in material.features},
        labels=Labels.of(*(np.where(kept, each, 1.0 - each) for each in (labels.weak, labels.strong))),
    )
    plain, other = (fit_gates(each, 0, ("ridge",)) for each in (material, changed))
    fresh = population.draw(np.random.default_rng(5), 50).features
    for mode, router in plain.routers.items():
        assert (router.probability(fresh[mode]) == other.routers[mode].probability(fresh[mode])).all()
    assert (plain.calibration.gain != other.calibration.gain).any()


def stacked(one: FeatureRows, two: FeatureRows) -> object:
    sparse = pytest.importorskip("scipy.sparse")
    return sparse.vstack((one.counts, two.counts)).tocsr()


def test_thresholds_come_from_the_shipped_gates_judgement(material: TrainingData) -> None:
    fitted = fit_gates(material, 0, ("ridge",))
    _, held_out = split_rows(material.labels, 0)
    judged: dict[Mode, Floats | None] = {"prompt": fitted.calibration.before, "cascade": fitted.calibration.after}
    for mode, p_gain in judged.items():
        assert p_gain == pytest.approx(fitted.routers[mode].probability(material.features[mode].take(held_out)))
    assert (fitted.calibration.cloud == material.labels.strong[held_out]).all()


def test_rows_that_ask_the_same_are_on_one_side() -> None:
    same = np.arange(N) // 3
    fitting, held_out = split_rows(Labels.of(np.zeros(N), np.ones(N), same), 0)
    assert not set(same[fitting]) & set(same[held_out])
    assert len(fitting) == len(held_out) == N // 2


def test_only_an_even_draw_is_held_out_and_nothing_that_asks_the_same_is_fitted_to() -> None:
    even = np.arange(N) % 4 == 0
    same = np.arange(N) // 2  # every other pair has a row of the even draw
    labels = Labels(np.zeros(N), np.ones(N), same=same, weight=np.ones(N), representative=even)
    fitting, held_out = split_rows(labels, 0)
    assert even[held_out].all()
    assert len(held_out) == even.sum() // 2
    assert not set(same[fitting]) & set(same[held_out])
    assert len(fitting) == N - 2 * len(held_out)


def test_another_seed_divides_otherwise() -> None:
    labels = Labels.of(np.zeros(N), np.ones(N))
    assert (split_rows(labels, 0)[1] == split_rows(labels, 0)[1]).all()
    assert set(split_rows(labels, 0)[1]) != set(split_rows(labels, 1)[1])


def test_fewer_than_a_hundred_rows_are_refused(population: SimulatedPopulation) -> None:
    with pytest.raises(InvalidRequestError, match="at least 100 graded prompts, not 99"):
        fit_gates(population.draw(np.random.default_rng(0), 99), 0, ("ridge",))


def test_rows_that_ask_too_few_different_things_are_refused(material: TrainingData) -> None:
    """With one question for all nothing would be left to fit on or to promise on."""
    for different in (1, 9):
        labels = replace(material.labels, same=np.arange(N) % different)
        with pytest.raises(InvalidRequestError, match=f"ask only {different} different questions"):
            fit_gates(replace(material, labels=labels), 0, ("ridge",))
    fit_gates(replace(material, labels=replace(material.labels, same=np.arange(N) % 10)), 0, ("ridge",))
