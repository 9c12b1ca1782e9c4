"""Gates 1 to 3: is the cloud's answer likely to be better? Asked before, while and after the device answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from ...classifier.target import Target
from ...protocol.errors import ConfigurationError, InvalidRequestError
from ...protocol.requests import ConfidenceSignal, Message
from ..tiers.interfaces import LocalAnswer

if TYPE_CHECKING:
    from ...classifier.arrays import Floats
    from ...classifier.calibration.threshold_path import Thresholds
    from ...classifier.features.gate_inputs import RunView, Signals
    from ...classifier.policy.policy import Policy


@dataclass(frozen=True, slots=True)
class GateDecision:
    """The decision of one gate, and the reason."""

    # 0 to 3.
    gate: int
    escalate: bool
    # For headers, ledger and `updraft why`.
    reason: str
    # Calibrated chance that the cloud's answer is better, if computed.
    p_gain: float | None = None
    # Of P(gain), above which the gate escalates.
    threshold: float | None = None
    # Chance with which a judged answer is graded, where exploration has a say in it.
    propensity: float | None = None
    # Chance with which this request was sampled for exploration, to be answered by both tiers; 0: it was not.
    exploration_chance: float = 0.0


class Gates(Protocol):
    """The three gates for one pair of models. `tokens`: how many tokens gate 2 wants to see.

    `quality` is the share of the cloud's quality that a request wants to keep; None: the router's own target.
    """

    tokens: int

    @property
    def quality(self) -> float | None:
        """The router's own target, if it is a quality that was calibrated."""
        ...

    @property
    def usual(self) -> Floats | None:
        """Gate 1's P(gain) of requests like those of the calibration, if known: what requests usually look like."""
        ...

    def check(self, quality: float | None) -> None:
        """Find the thresholds of this target, which takes a millisecond or two: the gates then look them up.

        Raises ConfigurationError if it was not calibrated; the gates do so too.
        """
        ...

    def begin(self) -> Gates:
        """The gates of one request: those that explore may draw it, and remember so until its end."""
        ...

    def before(self, messages: Sequence[Message], quality: float | None) -> GateDecision: ...
    def read_ahead(self, messages: Sequence[Message]) -> None:
        """Do what gate 3 needs of the question, while the local model is busy."""
        ...

    def read_lines(self, answer: str) -> None:
        """Do what gate 3 needs of the complete lines of an answer that has come so far."""
        ...

    def during(self, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:
        """From the first `tokens` tokens, or on a longer answer from its last `tokens`: has it collapsed?"""
        ...

    def after(self, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:
        """From the whole answer: is it good enough?"""
        ...


# As reasons name them.
_CONFIDENCES: dict[ConfidenceSignal, str] = {
    "probability": "confidence",
    "entropy": "confidence by entropy",
    "margin": "confidence by margin",
}
_QUALITIES = 10_000  # how many targets of requests are told apart; between two of them the stricter one holds


class PolicyGates:
    """A calibrated policy: P(gain) against the thresholds of the router's target, or of the quality of a request.

    `caveat`: what every reason begins with, where the policy was made for another pair.
    """

    def __init__(self, policy: Policy, target: Target, caveat: str = "") -> None:
        self.policy = policy
        self.target = target
        self._caveat = caveat
        self._thresholds: dict[float | None, Thresholds] = {}
        self.tokens = policy.gate2_tokens

    @property
    def quality(self) -> float | None:
        return self.target.value if self.target.name == "quality" else None

    @property
    def usual(self) -> Floats | None:
        return None if self._caveat else self.policy.usual

    def check(self, quality: float | None) -> None:
        self._at(quality)

    def begin(self) -> Gates:
        return self

    def before(self, messages: Sequence[Message], quality: float | None) -> GateDecision:
        from ...classifier.features.gate_inputs import PromptView

        if (unknown := self.policy.calibrated_on.lacks(messages)) is not None:
            return GateDecision(1, escalate=True, reason=f"{self._caveat}the policy was not calibrated on {unknown}")
        p_gain = float(self.policy.before(PromptView.of(messages)))
        return self._against(1, f"before generation{self._promised(quality)}", p_gain, self._at(quality).before)

    def read_ahead(self, messages: Sequence[Message]) -> None:
        from ...classifier.features.gate_inputs import PromptView

        self.policy.read_ahead(PromptView.of(messages))

    def read_lines(self, answer: str) -> None:
        self.policy.read_lines(answer)

    def during(self, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:
        window = answer.signals[-self.tokens :]
        p_gain = float(self.policy.during(run_view(messages, answer, window)))
        return self._against(2, f"while generating{self._promised(quality)}", p_gain, self._at(quality).during)

    def after(self, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:
        p_gain = float(self.policy.after(run_view(messages, answer, answer.signals)))
        return self._against(3, f"after generation{self._promised(quality)}", p_gain, self._at(quality).after)

    def _at(self, quality: float | None) -> Thresholds:
        if quality is not None:  # to the next of some thousand: so many are kept
            quality = min(1.0, math.ceil(quality * _QUALITIES - 1e-6) / _QUALITIES)
        if quality not in self._thresholds:
            self._thresholds[quality] = self.policy.thresholds_for(self._target_of(quality))
        return self._thresholds[quality]

    def _target_of(self, quality: float | None) -> Target:
        return self.target if quality is None else Target("quality", quality, promise=self.target.promise)

    def _promised(self, quality: float | None) -> str:
        """A reason's addition where the promise is not the usual one; another pair, or a cost, has no promise."""
        target = self._target_of(quality)
        kept = target.promise == "mean" and target.name != "cost" and not self._caveat
        return ", a threshold that keeps the target on average" if kept else ""

    def _against(self, gate: int, moment: str, p_gain: float, threshold: float) -> GateDecision:
        escalate = not p_gain <= threshold  # NaN escalates
        sign = "above" if escalate else "at most"
        reason = f"{self._caveat}P(gain) {p_gain:.3f} {sign} {threshold:.3f} {moment}"
        return GateDecision(gate, escalate, reason, p_gain, threshold)


def confidence_of(signals: Sequence[Signals], by: ConfidenceSignal) -> float:
    """The local model's mean confidence, from 0 to 1; 0 of no token.

    `probability`: the geometric mean of the token probabilities. `entropy`: one over the number of equally likely
    tokens that have the mean entropy. `margin`: a token's part of what it and the runner-up have together, at the mean
    margin.
    """
    if not signals:
        return 0.0
    if by == "probability":
        return math.exp(sum(signal.logprob for signal in signals) / len(signals))
    if by == "entropy":
        return math.exp(-sum(signal.entropy for signal in signals) / len(signals))
    return 0.5 + 0.5 * math.tanh(sum(signal.margin for signal in signals) / len(signals) / 2)


class _UncalibratedGates:
    """The common part of gates without a policy: no quality is calibrated, and nothing is read ahead."""

    quality: float | None = None
    usual: Floats | None = None

    def check(self, quality: float | None) -> None:
        if quality is not None:
            raise uncalibrated("quality")

    def begin(self) -> Self:
        return self

    def read_ahead(self, messages: Sequence[Message]) -> None:
        """Nothing is read."""

    def read_lines(self, answer: str) -> None:
        """Nothing is read."""


class ConfidenceGates(_UncalibratedGates):
    """The plain cascade (`confidence`): escalate when the local model is unsure. A heuristic, which promises nothing.

    Gate 3 compares `confidence_of` the answer with `confidence`; gate 2 stops a run whose last 16 tokens fall below
    half of it; gate 1 has nothing to go by.
    """

    tokens = 16

    def __init__(self, confidence: float, by: ConfidenceSignal = "probability") -> None:
        self._confidence = confidence
        self._by: ConfidenceSignal = by

    def before(self, messages: Sequence[Message], quality: float | None) -> GateDecision:  # noqa: ARG002
        return GateDecision(1, escalate=False, reason="uncalibrated: confidence in the local answer decides")

    def during(self, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:  # noqa: ARG002
        return self._judge(2, "while generating", answer.signals[-self.tokens :], self._confidence / 2)

    def after(
        self,
        messages: Sequence[Message],  # noqa: ARG002
        answer: LocalAnswer,
        quality: float | None,  # noqa: ARG002
    ) -> GateDecision:
        return self._judge(3, "after generation", answer.signals, self._confidence)

    def _judge(self, gate: int, moment: str, signals: Sequence[Signals], least: float) -> GateDecision:
        sure = confidence_of(signals, self._by)
        escalate = not sure >= least  # NaN escalates
        sign = "below" if escalate else "at least"
        return GateDecision(
            gate,
            escalate,
            f"uncalibrated: {_CONFIDENCES[self._by]} {sure:.2f} {sign} {least:.2f} {moment}",
            threshold=least,
        )


class NoPolicyGates(_UncalibratedGates):
    """No policy is calibrated for this pair: every request escalates, since no local answer has evidence behind it."""

    tokens = 2**31
    _why = "no policy is calibrated for this pair of models: `updraft calibrate` makes one"

    def before(self, messages: Sequence[Message], quality: float | None) -> GateDecision:  # noqa: ARG002
        return self._decision(1)

    def during(self, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:  # noqa: ARG002
        return self._decision(2)

    def after(self, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:  # noqa: ARG002
        return self._decision(3)

    def _decision(self, gate: int) -> GateDecision:
        return GateDecision(gate, escalate=True, reason=self._why)


class NoSignalGates(NoPolicyGates):
    """The local model is behind a server that gives no log-probabilities, so that nothing tells how sure it is."""

    _why = 'the local server gives no log-probabilities, so that it answers for model="local" only'


def uncalibrated(target: str) -> ConfigurationError:
    """Of a target that nothing but a calibrated policy can keep."""
    return ConfigurationError(
        f"{target} needs a policy that is calibrated for this pair of models, and there is none: make one with "
        "`updraft calibrate`, or state confidence= (a plain threshold), or no target.",
        param=target,
    )


def check_quality(gates: Gates, quality: float | None) -> None:
    """Raise InvalidRequestError if a request asks for a quality that was not calibrated."""
    try:
        gates.check(quality)
    except ConfigurationError as error:
        raise InvalidRequestError(error.message, param="updraft.quality", code="invalid_value") from error


def run_view(messages: Sequence[Message], answer: LocalAnswer, signals: Sequence[Signals]) -> RunView:
    from ...classifier.features.gate_inputs import RunView  # numpy comes with it

    return RunView.of(messages, answer, signals)
