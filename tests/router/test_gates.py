"""The gates: a policy's P(gain) against its thresholds, whose policy is accepted, and what holds without one."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from router_fakes import FakeSignals, FakeToken
from updraft.classifier.policy import Policy
from updraft.classifier.views import RunView
from updraft.protocol.errors import ConfigurationError, InvalidRequestError
from updraft.protocol.requests import Message
from updraft.router.gates import ConfidenceGates, PolicyGates, check_quality, load_gates
from updraft.router.tiers import LocalAnswer

MESSAGES = [Message(role="user", content="What is 2 + 2?")]
PAIR = {"local": "small", "cloud": "large"}


class ScriptedPolicy:
    """Gives each gate's answer and keeps what it was shown."""

    gate2_tokens = 4
    models = PAIR

    def __init__(self, before: float = 0.2, during: float = 0.3, after: float = 0.4) -> None:
        self._answers = before, during, after
        self.views: list[Any] = []

    def before(self, prompt: Any) -> float:
        self.views.append(prompt)
        return self._answers[0]

    def during(self, view: RunView) -> float:
        self.views.append(view)
        return self._answers[1]

    def after(self, view: RunView) -> float:
        self.views.append(view)
        return self._answers[2]

    def thresholds(self, quality: float) -> Any:
        if quality > 0.99:
            raise ConfigurationError("calibrated up to 0.99")
        return SimpleNamespace(before=0.5, during=0.25, after=0.4)


def written(*logprobs: float) -> LocalAnswer:
    signals = [FakeSignals(logprob=value) for value in logprobs]
    tokens = [FakeToken(index, "x", signal) for index, signal in enumerate(signals)]
    return LocalAnswer(5, list(tokens), list(signals), "x" * len(tokens), "stop")


def test_a_policy_escalates_above_its_threshold() -> None:
    gates = PolicyGates(ScriptedPolicy())  # type: ignore[arg-type]
    before = gates.before(MESSAGES, 0.98)
    assert (before.escalate, before.gate, before.p_gain, before.threshold) == (False, 1, 0.2, 0.5)
    assert gates.during(MESSAGES, written(-1.0), 0.98).escalate
    after = gates.after(MESSAGES, written(-1.0), 0.98)
    assert not after.escalate, "at the threshold is not above it"
    assert after.reason == "P(gain) 0.400 at most 0.400 after generation"
    assert PolicyGates(ScriptedPolicy(after=math.nan)).after(MESSAGES, written(-1.0), 0.98).escalate  # type: ignore[arg-type]


def test_gate_2_looks_at_the_last_tokens_and_gate_3_at_all() -> None:
    policy = ScriptedPolicy()
    gates = PolicyGates(policy)  # type: ignore[arg-type]
    answer = written(-1.0, -2.0, -3.0, -4.0, -5.0)
    answer.prompt_hidden = np.ones(3, dtype=np.float32)
    gates.during(MESSAGES, answer, 0.98)
    gates.after(MESSAGES, answer, 0.98)
    during, after = policy.views
    assert during.logprobs.tolist() == [-2.0, -3.0, -4.0, -5.0]
    assert after.logprobs.dtype == np.float32
    assert len(after.logprobs) == 5
    assert after.prompt.text == "What is 2 + 2?"
    assert after.prompt_hidden.tolist() == [1.0, 1.0, 1.0]


def test_a_quality_beyond_calibration_is_the_requests_fault() -> None:
    with pytest.raises(InvalidRequestError, match=r"up to 0\.99"):
        check_quality(PolicyGates(ScriptedPolicy()), 1.0)  # type: ignore[arg-type]


def test_confidence_without_a_policy() -> None:
    gates = ConfidenceGates(0.8)
    assert not gates.before(MESSAGES, 0.98).escalate
    sure, unsure = written(*[math.log(0.9)] * 20), written(*[math.log(0.7)] * 20)
    assert not gates.after(MESSAGES, sure, 0.98).escalate
    verdict = gates.after(MESSAGES, unsure, 0.98)
    assert verdict.escalate
    assert verdict.reason == "uncalibrated: mean token probability 0.70 below 0.80 after generation"
    assert verdict.p_gain is None
    assert not gates.during(MESSAGES, unsure, 0.98).escalate
    collapsed = written(*[math.log(0.99)] * 100, *[math.log(0.2)] * 16)
    assert gates.during(MESSAGES, collapsed, 0.98).escalate
    assert gates.after(MESSAGES, written(), 0.98).escalate


def test_whose_policy_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ScriptedPolicy()
    monkeypatch.setattr(Policy, "load", lambda folder: policy)

    def gates(name: str, models: dict[str, str], *, foreign: bool = False, packaged: Path | None = tmp_path) -> Any:
        return load_gates(name, models=models, packaged=packaged, allow_foreign=foreign, confidence=0.8)

    other = PAIR | {"cloud": "gpt"}
    assert isinstance(gates("auto", PAIR), PolicyGates)
    assert isinstance(gates("auto", other), ConfidenceGates)
    assert isinstance(gates("auto", PAIR, packaged=None), ConfidenceGates)
    assert isinstance(gates("none", PAIR), ConfidenceGates)
    assert isinstance(gates(str(tmp_path), PAIR), PolicyGates)
    assert isinstance(gates(str(tmp_path), other, foreign=True), PolicyGates)
    with pytest.raises(
        ConfigurationError, match="calibrated for small with large, but this router runs small with gpt"
    ):
        gates(str(tmp_path), other)


def test_a_policy_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no policy"):
        load_gates(str(tmp_path / "x"), models=PAIR, packaged=None, allow_foreign=False, confidence=0.8)
