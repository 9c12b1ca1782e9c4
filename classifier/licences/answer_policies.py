"""Policies that a task's learner tests: all answers without a visible fault, and linear gates on their features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import log1p

import numpy as np

from ..arrays import Array, Floats
from ..features.gate_inputs import RunView
from ..features.token_signals import SIGNAL_NAMES, signals
from .task_learner import LadderPolicy, SampledRow, TaskLearner

STEPS = 20
_SIGNALS = (
    *("tokens", "logprob_mean", "logprob_min", "logprob_q10", "logprob_first", "logprob_worst_window"),
    *("certainty_mean", "certainty_min", "margin_mean", "margin_q10", "logprob_sum"),
)
_PLACES = [SIGNAL_NAMES.index(name) for name in _SIGNALS]
#: Number of features of an answer.
FEATURES = len(_SIGNALS) + 1
_RIDGE = 10.0  # weight of the prior that no feature matters, in rows


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredRequest:
    """A request with the device's answer, as far as a policy of its task reads it."""

    # (`FEATURES`,) float32 features; None without an answer.
    features: Array | None
    # Whether the answer has a visible fault, or is missing.
    is_faulty: bool


def features_of(view: RunView) -> Array:
    """Return the features of a finished local run, (`FEATURES`,) float32. Without token signals, most are 0."""
    chosen = signals(view)[_PLACES]
    return np.append(chosen, np.float32(log1p(len(view.prompt.text)))).astype(np.float32)


class FaultlessPolicy:
    """The first policy of every task: it keeps each answer without a visible fault."""

    steps = 1

    def first_step(self, request: AnsweredRequest) -> int:
        return int(request.is_faulty)


@dataclass(frozen=True, slots=True, eq=False)
class LinearPolicy:
    """A linear estimate of the net gain of staying local. Step j keeps estimates down to the jth threshold."""

    # (`FEATURES`,) mean and scale of the features, and their weights.
    mean: Floats
    scale: Floats
    weights: Floats
    # (`STEPS`,) thresholds, descending.
    thresholds: Floats

    @property
    def steps(self) -> int:
        return len(self.thresholds)

    def first_step(self, request: AnsweredRequest) -> int:
        if request.is_faulty or request.features is None:
            return self.steps
        estimate = float((request.features - self.mean) / self.scale @ self.weights)
        return int(np.searchsorted(-self.thresholds, -estimate)) if np.isfinite(estimate) else self.steps


def fit_linear(rows: Sequence[SampledRow[AnsweredRequest]], quality: float) -> LadderPolicy[AnsweredRequest] | None:
    """Fit a ridge regression of `local - quality * cloud`, with thresholds at quantiles of its estimates. Return None
    if fewer than half of the rows have a faultless answer, or if all answers are of equal worth."""
    usable = [(row.request.features, row.local - quality * row.cloud) for row in rows if not row.request.is_faulty]
    features = np.array([each for each, _ in usable if each is not None], np.float64)
    worth = np.array([worth for each, worth in usable if each is not None])
    if 2 * len(worth) < len(rows) or not np.ptp(worth):
        return None
    mean, scale = features.mean(axis=0), features.std(axis=0) + 1e-6
    scaled = (features - mean) / scale
    gram = scaled.T @ scaled + _RIDGE * np.eye(scaled.shape[1])
    weights = np.asarray(np.linalg.solve(gram, scaled.T @ (worth - worth.mean())), np.float64)
    levels = np.quantile(scaled @ weights, 1.0 - np.arange(1, STEPS + 1) / STEPS)
    return LinearPolicy(mean, scale, weights, levels)


AnswerLearner = TaskLearner[AnsweredRequest]


def new_learner(quality: float) -> AnswerLearner:
    """Return a learner without rows, for a task that keeps `quality` with a confidence of 90 %."""
    return AnswerLearner(FaultlessPolicy(), partial(fit_linear, quality=quality), quality=quality)
