"""The simulation is as good as exact where steps take what they cost: then hardly an error is measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from updraft.bench.engine import step_times
from updraft.bench.shared.workload import Workload
from updraft.cloud_engine.models.loading.loader import load_model
from updraft.cloud_engine.planning.step_time import StepContent, StepTimeModel
from updraft.embedded import pocket

COSTS = StepTimeModel(0.01, 0.002, 0.0004, 1e-6, 1e-7)


def test_without_noise_there_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def of(batch: Any) -> StepContent:
        nonlocal now_s
        content = StepContent.of(batch)
        now_s += COSTS.seconds(content)
        return content

    monkeypatch.setattr(step_times, "StepContent", SimpleNamespace(of=of))
    monkeypatch.setattr(step_times, "time", SimpleNamespace(process_time=lambda: now_s))
    for name, value in (("_ROUNDS", 1), ("LOADS", (0.8,))):
        monkeypatch.setattr(step_times, name, value)
    torch.set_num_threads(1)
    model = load_model(pocket.pocket_large_folder())
    errors = step_times.simulation_errors(model, 4, Workload(24, max_prompt=60, max_output=20), lambda _: None)
    assert len(errors) == 5
    assert errors == {name: pytest.approx(0, abs=5e-3) for name in errors}
