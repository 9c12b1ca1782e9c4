"""A task moves to the device once it is proved, and back after a change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from updraft.bench.router import tasks
from updraft.classifier.licences.task_learner import FIRST_FIT, SampledRow, TaskLearner


@dataclass(frozen=True)
class Upward:
    """Keeps numbers local from each of the descending thresholds on."""

    thresholds: tuple[float, ...]

    @property
    def steps(self) -> int:
        return len(self.thresholds)

    def first_step(self, request: float) -> int:
        return next((step for step, least in enumerate(self.thresholds) if request >= least), self.steps)


ALL = Upward((0.0,))
LADDER = Upward(tuple(1 - step / 20 for step in range(1, 21)))


def learner(quality: float = 0.95) -> TaskLearner[float]:
    return TaskLearner(ALL, lambda _: LADDER, quality=quality)


def rows(rng: np.random.Generator, count: int, right_from: float) -> list[SampledRow[float]]:
    """The device is right from a number on."""
    return [SampledRow(x, float(x >= right_from), 1.0) for x in rng.random(count)]


def observe(task: TaskLearner[float], sampled: Sequence[SampledRow[float]]) -> None:
    for row in sampled:
        task.observe(row)


def test_a_perfect_task_needs_no_gate() -> None:
    task = learner()
    observe(task, rows(np.random.default_rng(0), FIRST_FIT, 0.0))
    assert task.licence is None
    assert task.sampling_rate(0.05) == 1.0
    assert 0 < task.evidence < 1
    observe(task, rows(np.random.default_rng(1), 60, 0.0))
    assert task.licence is not None
    assert task.licence.policy is ALL
    assert task.sampling_rate(0.05) == 0.05


def test_gates_keep_what_the_device_knows() -> None:
    task, rng = learner(), np.random.default_rng(0)
    observe(task, rows(rng, 2000, 0.3))
    assert task.licence is not None
    assert task.licence.policy is LADDER
    assert task.licence.keeps(0.4)
    assert not task.licence.keeps(0.2)
    assert 0.05 < task.sampling_rate(0.05) < 0.1 or task.sampling_rate(0.05) == 0.05


def test_a_bad_task_stays_with_the_cloud_but_for_what_the_quality_allows() -> None:
    task, rng = learner(), np.random.default_rng(0)
    observe(task, [SampledRow(x, float(rng.random() < 0.4), 1.0) for x in rng.random(2000)])
    assert task.licence is None or not task.licence.keeps(1 - 0.05 / 0.6)


def test_a_change_ends_the_licence_and_a_new_one_needs_new_rows() -> None:
    task, rng = learner(), np.random.default_rng(0)
    observe(task, rows(rng, 400, 0.0))
    assert task.licence is not None
    before = len(task.rows)
    for row in rows(rng, 1000, 0.4):
        task.observe(row)
        if task.num_revocations:
            break
    assert len(task.rows) < before + 60
    assert task.licence is None
    observe(task, rows(rng, 20, 0.0))
    assert task.licence is None
    observe(task, rows(rng, 400, 0.0))
    assert task.licence is not None


def test_a_replay_gives_the_same_licence_and_a_corrected_grade_another() -> None:
    sampled = rows(np.random.default_rng(0), 110, 0.0)
    first, again, corrected = learner(), learner(), learner()
    observe(first, sampled)
    observe(again, sampled)
    assert first.licence == again.licence is not None
    observe(corrected, [*sampled[:50], *(SampledRow(row.request, 0.0, 1.0) for row in sampled[50:70]), *sampled[70:]])
    assert corrected.licence is None


def test_simulated_traffic_in_short() -> None:
    """`updraft bench tasks` runs the whole."""
    figures = tasks.measure(2, 6_000, lambda _: None)
    for quality in tasks.QUALITIES:
        of = figures[f"quality {quality:g}"]
        assert of["most false licences of a task"] <= figures["limit of false licences"]
        assert of["local share over an oracle's"] > 0.2
        assert of["rows until revoked, 0.1 below"] < 150
