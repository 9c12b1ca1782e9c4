"""Policies that tasks test: faults, linear gates and their order."""

from __future__ import annotations

import numpy as np
import pytest
from updraft.classifier.features.gate_inputs import PromptView, RunView
from updraft.classifier.licences.answer_policies import (
    FEATURES,
    STEPS,
    AnsweredRequest,
    FaultlessPolicy,
    features_of,
    fit_linear,
)
from updraft.classifier.licences.task_learner import SampledRow

NOTHING = np.empty(0, np.float32)


def view(logprobs: np.ndarray, text: str = "four") -> RunView:
    signals = logprobs.astype(np.float32)
    return RunView(PromptView("2 + 2?"), text, signals, -signals, -signals, NOTHING, NOTHING, None, "stop")


def rows(count: int, seed: int = 0) -> list[SampledRow[AnsweredRequest]]:
    """Rows whose answers are right where the first feature is positive."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(count, FEATURES)).astype(np.float32)
    return [SampledRow(AnsweredRequest(each, is_faulty=False), float(each[0] > 0), 1.0) for each in features]


def test_features_of_answers_with_and_without_signals() -> None:
    sure, unsure = features_of(view(np.full(5, -0.01))), features_of(view(np.full(5, -3.0)))
    assert sure.shape == unsure.shape == (FEATURES,) and sure.dtype == np.float32
    assert sure[1] > unsure[1]
    assert np.isfinite(features_of(view(NOTHING))).all()


def test_the_first_policy_keeps_all_answers_without_a_fault() -> None:
    policy = FaultlessPolicy()
    assert policy.first_step(AnsweredRequest(None, is_faulty=False)) == 0
    assert policy.first_step(AnsweredRequest(None, is_faulty=True)) == policy.steps


def test_a_linear_gate_keeps_the_answers_that_are_worth_most_first() -> None:
    policy = fit_linear(rows(200), 0.95)
    assert policy is not None and policy.steps == STEPS
    unseen = rows(400, seed=1)
    first_steps = np.array([policy.first_step(row.request) for row in unseen])
    right = np.array([row.local for row in unseen])
    assert right[first_steps < 5].mean() == 1.0
    assert right[first_steps >= 15].mean() == 0.0
    assert policy.first_step(AnsweredRequest(unseen[0].request.features, is_faulty=True)) == STEPS
    assert policy.first_step(AnsweredRequest(np.full(FEATURES, np.nan, np.float32), is_faulty=False)) == STEPS
    again = fit_linear(rows(200), 0.95)
    assert again is not None and [again.first_step(row.request) for row in unseen] == first_steps.tolist()


@pytest.mark.parametrize("kind", ["faulty", "equal"])
def test_rows_that_teach_nothing_make_no_policy(kind: str) -> None:
    found = rows(100)
    if kind == "faulty":
        found = [SampledRow(AnsweredRequest(None, is_faulty=at % 3 > 0), 0.0, 1.0) for at in range(100)]
    else:
        found = [SampledRow(row.request, 1.0, 1.0) for row in found]
    assert fit_linear(found, 0.95) is None
