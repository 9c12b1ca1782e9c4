"""Gates 1 to 3, which judge whether the cloud would answer better, and the selection of a pair's gates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from ...classifier.target import Target
from ...model_files.identity import ModelIdentity
from ...protocol.errors import ConfigurationError, InvalidRequestError
from ...protocol.requests import ConfidenceSignal, Message
from ..tiers.interfaces import LocalAnswer

if TYPE_CHECKING:
    from ...classifier.arrays import Floats
    from ...classifier.calibration.threshold_path import Thresholds
    from ...classifier.features.gate_inputs import RunView, Signals
    from ...classifier.policy.policy import Policy, PolicyCard

P = TypeVar("P", "Policy", "PolicyCard")


@dataclass(frozen=True, slots=True)
class GateDecision:
    """Decision of one gate, with the reason."""

    # Number of the gate, 0 to 3.
    gate: int
    escalate: bool
    # Reason to show in headers, the ledger and `updraft why`.
    reason: str
    # Calibrated probability that the cloud's answer is better, P(gain), if computed.
    p_gain: float | None = None
    # P(gain) above which the gate escalates, or confidence below which it escalates.
    threshold: float | None = None
    # Confidence in the local answer, if the gate compares it with `threshold`.
    confidence: float | None = None
    # Probability that a cloud grades the answer, used to weight the answer in learning. None: no exploration.
    propensity: float | None = None
    # Probability with which this request was sampled for exploration, to be answered by both tiers; 0 if not sampled.
    exploration_chance: float = 0.0


class Gates(Protocol):
    """The three gates for one pair of models. `tokens`: number of tokens that gate 2 reads.

    `quality` is the share of the cloud's quality that a request wants to keep; None for the router's own target.
    The defaults are those of gates without a policy, which accept no quality target and precompute nothing.
    """

    tokens: int

    @property
    def quality(self) -> float | None:
        """The router's own quality target. None: the router has another kind of target."""
        return None

    @property
    def typical_p_gain(self) -> Floats | None:
        """Gate 1's P(gain) for typical calibration requests, which drift detection compares with live requests."""
        return None

    def check(self, quality: float | None) -> None:
        """Compute and cache the thresholds for the target `quality`, which takes a millisecond or two. Raises
        ConfigurationError if the target was not calibrated, as the gates would."""
        if quality is not None:
            raise uncalibrated("quality")

    def begin(self) -> Gates:
        """Return the gates for one request, which exploration may sample at random."""
        return self

    def judge(self, gate: int, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:
        """Decide whether to escalate. Gate 1 judges from the question, gate 2 from the first or latest `tokens` tokens
        whether the answer has gone wrong, and gate 3 from the whole answer whether it is good enough."""
        ...

    def read_ahead(self, messages: Sequence[Message]) -> None:
        """Precompute gate 3's features of the question, while the local model is busy."""

    def read_lines(self, answer: str) -> None:
        """Precompute gate 3's features of the complete lines in an unfinished answer."""


# Name of each confidence signal in the reason of a decision.
_CONFIDENCES: dict[ConfidenceSignal, str] = {
    "probability": "confidence",
    "entropy": "confidence by entropy",
    "margin": "confidence by margin",
}
_MOMENTS = {1: "before generation", 2: "while generating", 3: "after generation"}  # by gate
_QUALITIES = 10_000  # quality targets are rounded up to multiples of 1 / _QUALITIES


class PolicyGates(Gates):
    """Gates that compare P(gain) with a calibrated policy's thresholds for the router's or the request's target.
    `caveat`: prefix of every reason if the policy was calibrated for another pair of models."""

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
    def typical_p_gain(self) -> Floats | None:
        return None if self._caveat else self.policy.typical_p_gain

    def check(self, quality: float | None) -> None:
        self._at(quality)

    def judge(self, gate: int, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:
        from ...classifier.features.gate_inputs import PromptView

        if gate == 1:
            if (unknown := self.policy.calibrated_on.lacks(messages)) is not None:
                reason = f"{self._caveat}the policy was not calibrated on {unknown}"
                return GateDecision(1, escalate=True, reason=reason)
            p_gain = self.policy.before(PromptView.of(messages))
        elif gate == 2:
            p_gain = self.policy.during(run_view(messages, answer, answer.signals[-self.tokens :]))
        else:
            p_gain = self.policy.after(run_view(messages, answer, answer.signals))
        at = self._at(quality)
        threshold = {1: at.before, 2: at.during, 3: at.after}[gate]
        return self._against(gate, f"{_MOMENTS[gate]}{self._promised(quality)}", float(p_gain), threshold)

    def read_ahead(self, messages: Sequence[Message]) -> None:
        from ...classifier.features.gate_inputs import PromptView

        self.policy.read_ahead(PromptView.of(messages))

    def read_lines(self, answer: str) -> None:
        self.policy.read_lines(answer)

    def _at(self, quality: float | None) -> Thresholds:
        if quality is not None:  # round up, so that the number of cached targets is bounded
            quality = min(1.0, math.ceil(quality * _QUALITIES - 1e-6) / _QUALITIES)
        if quality not in self._thresholds:
            self._thresholds[quality] = self.policy.thresholds_for(self.target_of(quality))
        return self._thresholds[quality]

    def target_of(self, quality: float | None) -> Target:
        """Return the target of a request that states a `quality`, or the router's."""
        return self.target if quality is None else Target("quality", quality, promise=self.target.promise)

    def _promised(self, quality: float | None) -> str:
        """Return a note for the reason if the quality is promised on average, else an empty string."""
        target = self.target_of(quality)
        kept = target.promise == "mean" and target.name != "cost" and not self._caveat
        return ", which keeps the target on average" if kept else ""

    def _against(self, gate: int, moment: str, p_gain: float, threshold: float) -> GateDecision:
        escalate = not p_gain <= threshold  # a P(gain) of NaN escalates
        sign = "above" if escalate else "within"
        compared = f"{sign} threshold {threshold:.3f}" if threshold >= 0 else "escalates under this target"
        reason = f"{self._caveat}P(gain) {p_gain:.3f} {compared} {moment}"
        return GateDecision(gate, escalate, reason, p_gain, threshold)


def confidence_of(signals: Sequence[Signals], by: ConfidenceSignal) -> float:
    """Return the local model's mean confidence, from 0 to 1; 0 without tokens.

    `probability`: geometric mean of the token probabilities. `entropy`: exponential of the negated mean entropy.
    `margin`: sigmoid of the mean difference in log-probability between the two most likely tokens.
    """
    if not signals:
        return 0.0
    if by == "probability":
        return math.exp(sum(signal.logprob for signal in signals) / len(signals))
    if by == "entropy":
        return math.exp(-sum(signal.entropy for signal in signals) / len(signals))
    return 0.5 + 0.5 * math.tanh(sum(signal.margin for signal in signals) / len(signals) / 2)


class ConfidenceGates(Gates):
    """Gates of the plain cascade (`confidence`): escalate if the local model is unsure. No quality is promised.

    Gate 3 compares the answer's `confidence_of` with `confidence`; gate 2 stops a run whose last 16 tokens are below
    half of `confidence`; gate 1 never escalates.
    """

    tokens = 16

    def __init__(self, confidence: float, by: ConfidenceSignal = "probability") -> None:
        self._confidence = confidence
        self._by: ConfidenceSignal = by

    def judge(self, gate: int, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:  # noqa: ARG002
        if gate == 1:
            return GateDecision(1, escalate=False, reason="uncalibrated: confidence in the device's answer decides")
        signals, least = answer.signals, self._confidence
        if gate == 2:
            signals, least = signals[-self.tokens :], least / 2
        confidence = confidence_of(signals, self._by)
        escalate = not confidence >= least  # a confidence of NaN escalates
        compared = f"{confidence:.2f} {'below' if escalate else 'reaches'} threshold {least:.2f}"
        reason = f"uncalibrated: {_CONFIDENCES[self._by]} {compared} {_MOMENTS[gate]}"
        return GateDecision(gate, escalate, reason, threshold=least, confidence=confidence)


class NoPolicyGates(Gates):
    """Gates without a policy: every request escalates, because nothing is known about local answers."""

    tokens = 2**31
    _why = "no policy is calibrated for this pair of models: run `updraft calibrate`"

    def judge(self, gate: int, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:  # noqa: ARG002
        return GateDecision(gate, escalate=True, reason=self._why)


class NoSignalGates(NoPolicyGates):
    """Gates for a local server that reports no log-probabilities, so that the confidence is unknown."""

    _why = 'the local server reports no log-probabilities, so it answers only model="local"'


def uncalibrated(target: str) -> ConfigurationError:
    """Return the error for a target that needs a calibrated policy."""
    return ConfigurationError(
        f"{target} needs a policy calibrated for this pair of models, which is missing. Make one with "
        "`updraft calibrate`, or set no target, or a plain threshold: `confidence` (--confidence in commands).",
        param=target,
    )


def check_quality(gates: Gates, quality: float | None) -> None:
    """Raise InvalidRequestError if a request asks for a quality that was not calibrated."""
    try:
        gates.check(quality)
    except ConfigurationError as error:
        raise InvalidRequestError(error.message, param="updraft.quality", code="invalid_value") from error


def run_view(messages: Sequence[Message], answer: LocalAnswer, signals: Sequence[Signals]) -> RunView:
    from ...classifier.features.gate_inputs import RunView  # imported here, since importing numpy takes time

    return RunView.of(messages, answer, signals)


@dataclass(frozen=True, slots=True)
class GateSelection:
    """Settings that determine which policy or threshold the gates use."""

    # Value of the setting `policy` in `RouterConfig`.
    policy: str
    # Models of the running pair: {"local": name, "cloud": name}.
    models: dict[str, str]
    # Folders in which to look for a policy of this pair. The first policy found is used.
    own: tuple[Path, ...] = ()
    # Whether a policy that was calibrated for another pair may be used.
    allow_foreign: bool = False
    # Confidence threshold, if the gates compare only the confidence. A policy is then not used.
    confidence: float | None = None
    confidence_signal: ConfidenceSignal = "probability"
    target: Target = Target()  # noqa: RUF009  # frozen
    # Function that returns the identity of the loaded weights and template. None: any model is allowed.
    local_model: Callable[[], ModelIdentity] | None = None
    # Number of values in a hidden state of the local model. None: not known yet.
    hidden_size: int | None = None


def load_gates(selection: GateSelection) -> Gates:
    """Load the gates. Raises ConfigurationError if the policy is damaged, of another version or for other models."""
    if selection.confidence is not None:
        return ConfidenceGates(selection.confidence, selection.confidence_signal)
    from ...classifier.policy.policy import Policy

    chosen = _chosen(selection, Policy.load)
    if chosen is None:
        return NoPolicyGates()
    folder, policy = chosen
    if selection.hidden_size is not None:
        _check_widths(folder, policy.card, selection.hidden_size)
    return PolicyGates(policy, selection.target, _caveat(folder, policy, selection))


def check_policy(selection: GateSelection) -> bool:
    """Check the policy files that `load_gates` would load, and return whether any exist. Raises the same errors."""
    from ...classifier.policy.policy import checked_card

    chosen = _chosen(selection, checked_card)
    if chosen is None:
        return False
    _caveat(*chosen, selection)
    return True


def _chosen(selection: GateSelection, load: Callable[[Path], P]) -> tuple[Path, P] | None:
    """Return the folder and the policy, or None if no folder in `selection.own` has a policy of the pair."""
    from ...classifier.policy.folders import named_folder

    if selection.policy == "auto":
        for folder in selection.own:
            policy = load(folder)
            if policy.models == selection.models or selection.allow_foreign:
                return folder, policy
        return None
    folder = named_folder(selection.policy)
    policy = load(folder)
    if policy.models != selection.models and not selection.allow_foreign:
        raise ConfigurationError(
            f"The policy in {folder} was calibrated for {_pair(policy.models)}, but this router runs "
            f"{_pair(selection.models)}: its thresholds do not apply here. Calibrate one for this pair (updraft "
            "calibrate), set confidence= instead (a plain threshold), or set allow_foreign_policy=true to use it "
            "anyway.",
            param="policy",
        )
    return folder, policy


def _caveat(folder: Path, policy: Policy | PolicyCard, selection: GateSelection) -> str:
    """Return the prefix of every reason if the policy was made for another pair. Raises ConfigurationError."""
    caveat = "" if policy.models == selection.models else _foreign(_pair(policy.models))
    if not caveat and policy.local_model is not None and selection.local_model is not None:
        difference = policy.local_model.difference(selection.local_model())
        if difference is not None and not selection.allow_foreign:
            raise other_weights(folder, policy.models, difference)
        caveat = "" if difference is None else _foreign(f"{_pair(policy.models)}, {difference[0]}")
    return caveat


def _check_widths(folder: Path, card: PolicyCard, hidden_size: int) -> None:
    from ...classifier.features.blocks import BLOCKS

    declared = {
        width for blocks in card.blocks.values() for name, width in blocks.items() if BLOCKS[name].width is None
    }
    if declared - {hidden_size}:
        raise ConfigurationError(
            f"The policy in {folder} reads hidden states of {max(declared)} values, but the local model has "
            f"{hidden_size}: it was made for another kind of model. Calibrate a policy for this model (updraft "
            "calibrate).",
            param="policy",
        )


def other_weights(folder: Path, models: dict[str, str], difference: tuple[str, str]) -> ConfigurationError:
    """Return the error for a policy whose local model has the same name as the running model but differs from it."""
    made, runs = difference
    return ConfigurationError(
        f"The policy in {folder} was calibrated for {models.get('local')} as {made}, but here it runs as {runs}. The "
        "model answers differently, so the promise does not hold. Calibrate again (updraft calibrate), run the file of "
        "the calibration, set confidence= instead (a plain threshold), or set allow_foreign_policy=true to use the "
        "policy anyway.",
        param="policy",
        code="policy_of_another_model",
    )


def _foreign(whose: str) -> str:
    return f"uncalibrated for this pair (policy of {whose}): "


def _pair(models: dict[str, str]) -> str:
    return f"{models.get('local')} with {models.get('cloud')}"
