"""The gates: a policy's P(gain) against its thresholds, whose policy is accepted, and what holds without one."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from router_fakes import FakeSignals, FakeToken
from updraft.classifier.features.gate_inputs import RunView
from updraft.classifier.policy.calibration_scope import CalibrationScope
from updraft.classifier.policy.policy import Policy
from updraft.classifier.target import Target
from updraft.protocol.errors import ConfigurationError, InvalidRequestError
from updraft.protocol.requests import Message
from updraft.router.gates.exploration import ExplorationGates
from updraft.router.gates.gates import (
    ConfidenceGates,
    ConfidenceSignal,
    GateSelection,
    NoPolicyGates,
    PolicyGates,
    check_quality,
    confidence_of,
    load_gates,
)
from updraft.router.tiers.interfaces import LocalAnswer

MESSAGES = [Message(role="user", content="What is 2 + 2?")]
PAIR = {"local": "small", "cloud": "large"}


class ScriptedPolicy:
    """Gives each gate's answer and keeps what it was shown."""

    gate2_tokens = 4
    models = PAIR
    calibrated_on = CalibrationScope()
    local_model = None
    typical_p_gain = None

    def __init__(self, before: float = 0.2, during: float = 0.3, after: float = 0.4) -> None:
        self._answers = before, during, after
        self.views: list[Any] = []
        self.targets: list[Target] = []

    def before(self, prompt: Any) -> float:
        self.views.append(prompt)
        return self._answers[0]

    def read_ahead(self, prompt: Any) -> None:
        self.views.append(prompt)

    def read_lines(self, answer: str) -> None:
        self.views.append(answer)

    def during(self, view: RunView) -> float:
        self.views.append(view)
        return self._answers[1]

    def after(self, view: RunView) -> float:
        self.views.append(view)
        return self._answers[2]

    def thresholds_for(self, target: Target) -> Any:
        self.targets.append(target)
        if target.name == "quality" and target.value > 0.99:
            raise ConfigurationError("calibrated up to 0.99")
        return SimpleNamespace(before=0.5, during=0.25, after=0.4)


def written(*logprobs: float) -> LocalAnswer:
    signals = [FakeSignals(logprob=value) for value in logprobs]
    tokens = [FakeToken(index, "x", signal) for index, signal in enumerate(signals)]
    return LocalAnswer(5, 0, list(tokens), list(signals), "x" * len(tokens), "stop")


def test_a_policy_escalates_above_its_threshold() -> None:
    gates = PolicyGates(ScriptedPolicy(), Target())
    before = gates.judge(1, MESSAGES, LocalAnswer(), 0.98)
    assert (before.escalate, before.gate, before.p_gain, before.threshold) == (False, 1, 0.2, 0.5)
    assert gates.judge(2, MESSAGES, written(-1.0), 0.98).escalate
    after = gates.judge(3, MESSAGES, written(-1.0), 0.98)
    assert not after.escalate, "at the threshold is not above it"
    assert after.reason == "P(gain) 0.400 within threshold 0.400 after generation"
    assert PolicyGates(ScriptedPolicy(after=math.nan), Target()).judge(3, MESSAGES, written(-1.0), 0.98).escalate


def test_gate_2_looks_at_the_last_tokens_and_gate_3_at_all() -> None:
    policy = ScriptedPolicy()
    gates = PolicyGates(policy, Target())
    answer = written(-1.0, -2.0, -3.0, -4.0, -5.0)
    answer.prompt_hidden = np.ones(3, dtype=np.float32)
    gates.judge(2, MESSAGES, answer, 0.98)
    gates.judge(3, MESSAGES, answer, 0.98)
    during, after = policy.views
    assert during.logprobs.tolist() == [-2.0, -3.0, -4.0, -5.0]
    assert after.logprobs.dtype == np.float32
    assert len(after.logprobs) == 5
    assert after.prompt.text == "What is 2 + 2?"
    assert after.prompt_hidden.tolist() == [1.0, 1.0, 1.0]


def test_a_quality_beyond_calibration_is_the_requests_fault() -> None:
    with pytest.raises(InvalidRequestError, match=r"up to 0\.99"):
        check_quality(PolicyGates(ScriptedPolicy(), Target()), 1.0)


def test_confidence_without_a_policy() -> None:
    gates = ConfidenceGates(0.8)
    assert not gates.judge(1, MESSAGES, LocalAnswer(), None).escalate
    with pytest.raises(InvalidRequestError, match="updraft calibrate"):
        check_quality(gates, 0.98)
    sure, unsure = written(*[math.log(0.9)] * 20), written(*[math.log(0.7)] * 20)
    assert not gates.judge(3, MESSAGES, sure, 0.98).escalate
    decision = gates.judge(3, MESSAGES, unsure, 0.98)
    assert decision.escalate
    assert decision.reason == "uncalibrated: confidence 0.70 below threshold 0.80 after generation"
    assert decision.p_gain is None
    assert not gates.judge(2, MESSAGES, unsure, 0.98).escalate
    collapsed = written(*[math.log(0.99)] * 100, *[math.log(0.2)] * 16)
    assert gates.judge(2, MESSAGES, collapsed, 0.98).escalate
    assert gates.judge(3, MESSAGES, written(), 0.98).escalate


def test_confidence_by_entropy_and_by_margin() -> None:
    """Each is 1 for a model that had no doubt; two equally likely tokens are one half under all three."""
    sure, torn = [FakeSignals(0.0, 0.0, 40.0)] * 5, [FakeSignals(-math.log(2), math.log(2), 0.0)] * 5
    for by in get_args(ConfidenceSignal):
        assert confidence_of(sure, by) == pytest.approx(1.0)
        assert confidence_of(torn, by) == pytest.approx(0.5)
        assert 0.5 < confidence_of([*sure, *torn], by) <= 1.0
        assert confidence_of([], by) == 0.0
    assert confidence_of([FakeSignals(margin=-1e6)], "margin") == 0.0  # a sampled token that hardly any other is below
    unsure = LocalAnswer(signals=[FakeSignals(-0.01, math.log(4), 5.0)] * 9)
    by_entropy = ConfidenceGates(0.8, "entropy").judge(3, MESSAGES, unsure, None)
    assert by_entropy.escalate
    assert by_entropy.reason == "uncalibrated: confidence by entropy 0.25 below threshold 0.80 after generation"
    by_margin = ConfidenceGates(0.8, "margin").judge(3, MESSAGES, unsure, None)
    assert not by_margin.escalate
    assert by_margin.reason == "uncalibrated: confidence by margin 0.99 reaches threshold 0.80 after generation"
    unknown = LocalAnswer(signals=[FakeSignals(entropy=math.nan)])
    assert ConfidenceGates(0.8, "entropy").judge(3, MESSAGES, unknown, None).escalate


def test_the_target_of_the_router_and_that_of_a_request() -> None:
    policy = ScriptedPolicy()
    gates = PolicyGates(policy, Target("cloud_share", 0.2))
    gates.judge(1, MESSAGES, LocalAnswer(), None)
    gates.judge(1, MESSAGES, LocalAnswer(), 0.9)
    gates.judge(1, MESSAGES, LocalAnswer(), None)
    assert policy.targets == [Target("cloud_share", 0.2), Target("quality", 0.9)]


def test_choice_of_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ScriptedPolicy()
    monkeypatch.setattr(Policy, "load", lambda folder: policy)

    def gates(name: str, models: dict[str, str], **choice: Any) -> Any:
        return load_gates(GateSelection(name, models, **{"own": (tmp_path,)} | choice))

    other = PAIR | {"cloud": "gpt"}
    assert isinstance(gates("auto", PAIR), PolicyGates)
    assert isinstance(gates("auto", PAIR, own=()), NoPolicyGates)
    assert isinstance(gates("auto", PAIR, confidence=0.8), ConfidenceGates)
    assert isinstance(gates(str(tmp_path), PAIR), PolicyGates)
    for name in (str(tmp_path), "auto"):
        foreign = gates(name, other, allow_foreign=True).judge(1, MESSAGES, LocalAnswer(), None).reason
        assert foreign.startswith("uncalibrated for this pair (policy of small with large)")
        assert (
            gates(name, PAIR, allow_foreign=True).judge(1, MESSAGES, LocalAnswer(), None).reason.startswith("P(gain)")
        )
    with pytest.raises(
        ConfigurationError, match="calibrated for small with large, but this router runs small with gpt"
    ):
        gates(str(tmp_path), other)
    without = gates("auto", other)
    assert isinstance(without, NoPolicyGates)
    decision = without.judge(1, MESSAGES, LocalAnswer(), None)
    assert decision.escalate
    assert "no policy is calibrated for this pair" in decision.reason
    assert "updraft calibrate" in decision.reason
    with pytest.raises(InvalidRequestError, match="updraft calibrate"):
        check_quality(without, 0.9)


def test_uncalibrated_requests_escalate_before_generation() -> None:
    policy = ScriptedPolicy(before=0.0)
    gates = PolicyGates(policy, Target())
    earlier = [Message(role="user", content="Prove it."), Message(role="assistant", content="Done.")]
    for messages, unknown in (
        ([*earlier, Message(role="user", content="and why?")], "conversations of 3 turns"),
        ([Message(role="user", content="Почему небо голубое?")], "Cyrillic script"),
    ):
        decision = gates.judge(1, messages, LocalAnswer(), None)
        assert (decision.escalate, decision.gate, decision.p_gain) == (True, 1, None)
        assert decision.reason == f"the policy was not calibrated on {unknown}"
    assert not gates.judge(1, [Message(role="system", content="Be brief."), *MESSAGES], LocalAnswer(), None).escalate
    policy.calibrated_on = CalibrationScope(("Cyrillic", "Latin"), turns=3)
    assert not gates.judge(1, [*earlier, Message(role="user", content="почему?")], LocalAnswer(), None).escalate


def test_invalid_policy_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no policy"):
        load_gates(GateSelection(str(tmp_path / "x"), PAIR))


def test_a_target_of_a_request_is_computed_once_and_never_beside_others() -> None:
    """`check` computes it, off the event loop; the gates look it up, however many targets there are."""
    policy = ScriptedPolicy()
    gates = PolicyGates(policy, Target("quality", 0.95))
    for number in range(1, 500):
        gates.check(number / 1000)
    computed = len(policy.targets)
    assert computed == 499
    for number in range(1, 500):
        gates.judge(1, MESSAGES, LocalAnswer(), number / 1000)
        gates.check(number / 1000 - 1e-9)
    assert len(policy.targets) == computed


def test_targets_of_requests_are_bounded_in_number_and_never_laxer() -> None:
    policy = ScriptedPolicy()
    gates = PolicyGates(policy, Target("quality", 0.95))
    for number in range(20_000):
        gates.check(0.5 + number / 10**7)
    assert len(policy.targets) <= 21
    assert all(later.value >= 0.5 for later in policy.targets)
    gates.check(0.98765)
    assert policy.targets[-1].value == pytest.approx(0.9877)


def test_the_stricter_target_of_an_alarm_is_computed_beforehand() -> None:
    policy = ScriptedPolicy()
    monitor: Any = SimpleNamespace(alarm=None, observe=lambda _: None)
    gates = ExplorationGates(PolicyGates(policy, Target("quality", 0.95)), monitor=monitor)
    gates.check(0.9)
    computed = len(policy.targets)
    monitor.alarm = "the requests have changed"
    gates.judge(1, MESSAGES, LocalAnswer(), 0.9)
    assert len(policy.targets) == computed


def test_a_promise_on_average_is_named_in_every_reason_and_kept_for_targets_of_requests() -> None:
    policy = ScriptedPolicy()
    gates = PolicyGates(policy, Target("cloud_share", 0.3, promise="mean"))
    decision = gates.judge(1, MESSAGES, LocalAnswer(), None)
    assert (
        decision.reason == "P(gain) 0.200 within threshold 0.500 before generation, which keeps the target on average"
    )
    gates.judge(1, MESSAGES, LocalAnswer(), 0.9)
    assert policy.targets == [Target("cloud_share", 0.3, promise="mean"), Target("quality", 0.9, promise="mean")]
    assert (
        "on average" not in PolicyGates(policy, Target("quality", 0.9)).judge(1, MESSAGES, LocalAnswer(), None).reason
    )


def test_no_reason_names_a_promise_that_nobody_gives() -> None:
    mean = Target("cloud_share", 0.3, promise="mean")
    foreign = PolicyGates(ScriptedPolicy(), mean, "uncalibrated for this pair (policy of a with b): ")
    cost = PolicyGates(ScriptedPolicy(), Target("cost", 0.5, (0.5, 1.5), promise="mean"))
    own, answer = PolicyGates(ScriptedPolicy(), mean), written(-0.1)
    for gates, promised in ((own, True), (foreign, False), (cost, False)):
        decisions = (
            gates.judge(1, MESSAGES, LocalAnswer(), None),
            gates.judge(2, MESSAGES, answer, None),
            gates.judge(3, MESSAGES, answer, None),
        )
        assert [decision.reason.endswith("on average") for decision in decisions] == [promised] * 3
    assert cost.judge(1, MESSAGES, LocalAnswer(), 0.9).reason.endswith("on average"), (
        "a request's own quality is promised all the same"
    )
