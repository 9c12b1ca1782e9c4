"""`updraft bench tasks`: licences on simulated traffic whose truth is known.

A request is a vector of features. Only the first one tells how likely the device's answer is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median
from typing import Any

import numpy as np
from scipy.special import expit

from ...classifier.arrays import Floats
from ...classifier.licences.betting import RevocationTest
from ...classifier.licences.task_learner import LadderPolicy, SampledRow, TaskLearner

STEPS, FEATURES = 20, 4
QUALITIES = (0.9, 0.95, 0.98)
REQUESTS, DELTA, EXPLORATION = 20_000, 0.1, 0.05
_POPULATION = 20_000  # requests from which true means are computed
_FALLS = (0.1, 0.05, 0.02)


@dataclass(frozen=True, slots=True)
class SimulatedTask:
    """A task. The device is right with probability expit(`level` + `slope` * first feature)."""

    name: str
    # Share of all requests.
    share: float
    level: float
    slope: float = 0.0
    # Probability that the cloud is right.
    cloud: float = 1.0
    # `level` in the second half of the traffic; None: as in the first half.
    later_level: float | None = None

    def rates(self, features: Floats, level: float | None = None) -> Floats:
        """Return the probability that the device is right, (n,), for features (n, `FEATURES`)."""
        return expit((self.level if level is None else level) + self.slope * features[:, 0])


def simulated_tasks() -> list[SimulatedTask]:
    """Return twelve tasks: three perfect, three good, three bad, one that turns bad, and two rare ones."""
    usual = 0.098
    perfect = [SimulatedTask(f"perfect {at}", usual, 5.5, cloud=1.0) for at in range(3)]
    good = [SimulatedTask(f"good {at}", usual, 2.5, 3.0, cloud=(1.0, 0.95, 0.9)[at]) for at in range(3)]
    bad = [SimulatedTask(f"bad {at}", usual, (-1.0, 0.0, 1.0)[at], 0.3) for at in range(3)]
    turning = SimulatedTask("turning", usual, 5.5, later_level=0.5)
    rare = [SimulatedTask("rare, perfect", 0.01, 5.5), SimulatedTask("rare, bad", 0.01, 0.0)]
    return [*perfect, *good, *bad, turning, *rare]


class _KeepsAll:
    """The first policy of a task: no gates."""

    steps = 1

    def first_step(self, request: Floats) -> int:
        del request
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class _LinearPolicy:
    """A linear gate. Step j keeps the requests whose score reaches the jth of the descending `thresholds`."""

    weights: Floats
    thresholds: Floats

    @property
    def steps(self) -> int:
        return len(self.thresholds)

    def first_step(self, request: Floats) -> int:
        score = self.weights[0] + float(self.weights[1:] @ request)
        return int(np.searchsorted(-self.thresholds, -score))

    def keeps(self, features: Floats, step: int) -> Any:
        return self.weights[0] + features @ self.weights[1:] >= self.thresholds[step]


def fitter(quality: float) -> Callable[[Sequence[SampledRow[Floats]]], LadderPolicy[Floats]]:
    """Return a function that fits a linear gate to the net gain of staying local, with 20 thresholds at quantiles."""

    def fit(rows: Sequence[SampledRow[Floats]]) -> LadderPolicy[Floats]:
        features = np.array([row.request for row in rows])
        worth = np.array([row.local - quality * row.cloud for row in rows])
        design = np.column_stack((np.ones(len(rows)), features))
        solved = np.linalg.solve(design.T @ design + np.eye(design.shape[1]), design.T @ worth)
        weights = np.asarray(solved, np.float64)
        return _LinearPolicy(weights, np.quantile(design @ weights, 1.0 - np.arange(1, STEPS + 1) / STEPS))

    return fit


@dataclass(slots=True)
class _TaskOutcome:
    kept: int = 0
    # Requests that an oracle would have kept, which knows each request's probability and obeys the quality.
    oracle: float = 0.0
    is_false: bool = False
    revocations: int = 0


def run_traffic(
    tasks: Sequence[SimulatedTask], quality: float, requests: int, rng: np.random.Generator
) -> list[_TaskOutcome]:
    """Route simulated requests of all tasks, and return the result of each task."""
    population = rng.normal(size=(_POPULATION, FEATURES))
    outcomes = [_TaskOutcome() for _ in tasks]
    learners = [TaskLearner(_KeepsAll(), fitter(quality), quality=quality, delta=DELTA) for _ in tasks]
    shares = np.array([task.share for task in tasks])
    for half in range(2):
        now = [
            replace(task, level=task.later_level) if half and task.later_level is not None else task for task in tasks
        ]
        chosen = rng.choice(len(tasks), requests // 2, p=shares / shares.sum())
        features = rng.normal(size=(len(chosen), FEATURES))
        luck = rng.random((len(chosen), 3))
        for at, number in enumerate(chosen.tolist()):
            task, learner, outcome, request = now[number], learners[number], outcomes[number], features[at]
            licence = learner.licence
            if luck[at, 0] < learner.sampling_rate(EXPLORATION):
                local = float(luck[at, 1] < float(expit(task.level + task.slope * request[0])))
                learner.observe(SampledRow(request, local, float(luck[at, 2] < task.cloud)))
                newest = learner.licence
                is_new = newest is not None and newest != licence
                if is_new and not (half and task.later_level is not None):
                    outcome.is_false |= _misses(task, newest, population, quality)
            elif licence.keeps(request):
                outcome.kept += 1
        for number, task in enumerate(now):
            count = int((chosen == number).sum())
            outcomes[number].oracle += count * _oracle_share(task, population, quality)
    for learner, outcome in zip(learners, outcomes, strict=True):
        outcome.revocations = learner.num_revocations
    return outcomes


def _misses(task: SimulatedTask, licence: Any, population: Floats, quality: float) -> bool:
    """Return whether routed answers under a licence score below the quality on average."""
    policy, rates = licence.policy, task.rates(population)
    kept = policy.keeps(population, licence.step) if isinstance(policy, _LinearPolicy) else np.ones(len(rates), bool)
    return float(np.where(kept, rates, task.cloud).mean()) < quality * task.cloud


def _oracle_share(task: SimulatedTask, population: Floats, quality: float) -> float:
    """Return the largest share that thresholds on the true probabilities keep local at this quality."""
    rates = np.sort(task.rates(population))[::-1]
    means = (np.cumsum(rates) + task.cloud * np.arange(len(rates) - 1, -1, -1)) / len(rates)
    return float((means >= quality * task.cloud).cumprod().mean())


def rows_until_revoked(quality: float, fall: float, rng: np.random.Generator, limit: int = 100_000) -> int:
    """Return the sampled rows until a licence ends whose answers are right with probability `quality` - `fall`."""
    watch = RevocationTest(quality)
    for row in range(limit):
        watch.observe(float(rng.random() < quality - fall), 1.0)
        if watch.is_revoked:
            return row + 1
    return limit


def measure(runs: int, requests: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the figures by quality: false licences, local share over an oracle's, and rows until a revocation."""
    tasks = simulated_tasks()
    results: dict[str, Any] = {"limit of false licences": DELTA + 3 * sqrt(DELTA * (1 - DELTA) / runs)}
    for quality in QUALITIES:
        rng = np.random.default_rng(int(1000 * quality))
        outcomes = [run_traffic(tasks, quality, requests, rng) for _ in range(runs)]
        kept = sum(outcome.kept for run in outcomes for outcome in run)
        oracle = sum(outcome.oracle for run in outcomes for outcome in run)
        false = {task.name: sum(run[at].is_false for run in outcomes) / runs for at, task in enumerate(tasks)}
        steady = [at for at, task in enumerate(tasks) if task.later_level is None]
        figures: dict[str, Any] = {
            "most false licences of a task": max(false.values()),
            "local share over an oracle's": kept / oracle,
            "revocations of steady tasks per run": sum(run[at].revocations for run in outcomes for at in steady) / runs,
            "share of oracle by task": {
                task.name: sum(run[at].kept for run in outcomes) / max(1.0, sum(run[at].oracle for run in outcomes))
                for at, task in enumerate(tasks)
            },
        }
        for fall in _FALLS:
            figures[f"rows until revoked, {fall:g} below"] = median(
                rows_until_revoked(quality, fall, rng) for _ in range(runs)
            )
        results[f"quality {quality:g}"] = figures
        say(f"quality {quality:g}: {figures}")
    return results
