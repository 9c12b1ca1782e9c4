"""Gates 1 to 3: is the cloud's answer likely to be better? Asked before, while and after the device answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..protocol.errors import ConfigurationError, InvalidRequestError
from ..protocol.requests import Message
from .tiers import LocalAnswer

if TYPE_CHECKING:
    from ..classifier.policy import Policy
    from ..classifier.thresholds import Thresholds
    from ..classifier.views import RunView, Signals


@dataclass(frozen=True, slots=True)
class Verdict:
    """One gate's word. `p_gain`: calibrated chance that the cloud's answer is better, if computed."""

    gate: int
    escalate: bool
    reason: str
    p_gain: float | None = None
    threshold: float | None = None


class Gates(Protocol):
    """The three gates for one pair of models. `tokens`: how many tokens gate 2 wants to see.

    `quality` is the share of the cloud's quality to keep.
    """

    tokens: int

    def check(self, quality: float) -> None:
        """Raises ConfigurationError if this target was not calibrated; the gates do so too."""
        ...

    def before(self, messages: Sequence[Message], quality: float) -> Verdict: ...
    def during(self, messages: Sequence[Message], answer: LocalAnswer, quality: float) -> Verdict:
        """From the first `tokens` tokens, or on a longer answer from its last `tokens`: has it collapsed?"""
        ...

    def after(self, messages: Sequence[Message], answer: LocalAnswer, quality: float) -> Verdict: ...


class PolicyGates:
    """A calibrated policy: P(gain) against the thresholds of the wanted quality."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._thresholds: dict[float, Thresholds] = {}
        self.tokens = policy.gate2_tokens

    def check(self, quality: float) -> None:
        self._at(quality)

    def before(self, messages: Sequence[Message], quality: float) -> Verdict:
        from ..classifier.views import PromptView

        p_gain = float(self._policy.before(PromptView.of(messages)))
        return _against(1, "before generation", p_gain, self._at(quality).before)

    def during(self, messages: Sequence[Message], answer: LocalAnswer, quality: float) -> Verdict:
        window = answer.signals[-self.tokens :]
        p_gain = float(self._policy.during(_run_view(messages, answer, window)))
        return _against(2, "while generating", p_gain, self._at(quality).during)

    def after(self, messages: Sequence[Message], answer: LocalAnswer, quality: float) -> Verdict:
        p_gain = float(self._policy.after(_run_view(messages, answer, answer.signals)))
        return _against(3, "after generation", p_gain, self._at(quality).after)

    def _at(self, quality: float) -> Thresholds:
        if quality not in self._thresholds:
            if len(self._thresholds) >= 64:  # per-request targets are the caller's to choose: keep the memory bounded
                self._thresholds.clear()
            self._thresholds[quality] = self._policy.thresholds(quality)
        return self._thresholds[quality]


class ConfidenceGates:
    """No policy for this pair: escalate when the mean token probability is low. Says that it is uncalibrated.

    Gate 3 compares the geometric mean of the answer's token probabilities with `confidence`; gate 2 stops a run whose
    last 16 tokens fall below half of it; gate 1 has nothing to go by.
    """

    tokens = 16

    def __init__(self, confidence: float) -> None:
        self._confidence = confidence

    def check(self, quality: float) -> None:
        """Any target will do, as none is calibrated."""

    def before(self, messages: Sequence[Message], quality: float) -> Verdict:  # noqa: ARG002
        return Verdict(1, escalate=False, reason="uncalibrated: no policy for this pair of models")

    def during(self, messages: Sequence[Message], answer: LocalAnswer, quality: float) -> Verdict:  # noqa: ARG002
        return self._judge(2, "while generating", answer.signals[-self.tokens :], self._confidence / 2)

    def after(self, messages: Sequence[Message], answer: LocalAnswer, quality: float) -> Verdict:  # noqa: ARG002
        return self._judge(3, "after generation", answer.signals, self._confidence)

    def _judge(self, gate: int, moment: str, signals: Sequence[Signals], least: float) -> Verdict:
        sure = math.exp(sum(signal.logprob for signal in signals) / len(signals)) if signals else 0.0
        escalate = not sure >= least  # NaN escalates
        sign = "below" if escalate else "at least"
        return Verdict(
            gate,
            escalate,
            f"uncalibrated: mean token probability {sure:.2f} {sign} {least:.2f} {moment}",
            threshold=least,
        )


def load_gates(
    policy: str, *, models: dict[str, str], packaged: Path | None, allow_foreign: bool, confidence: float
) -> Gates:
    """The gates for the pair `models` ({"local", "cloud"}) under `RouterConfig.policy`.

    Raises ConfigurationError if a policy named by its folder was made for other models and `allow_foreign` is off.
    """
    if policy == "none":
        return ConfidenceGates(confidence)
    if policy == "auto" and packaged is None:
        return ConfidenceGates(confidence)
    from ..classifier.policy import Policy

    folder = packaged if policy == "auto" and packaged is not None else Path(policy).expanduser()
    loaded = Policy.load(folder)
    if loaded.models == models or allow_foreign:
        return PolicyGates(loaded)
    if policy == "auto":
        return ConfidenceGates(confidence)
    raise ConfigurationError(
        f"The policy in {folder} was calibrated for {_pair(loaded.models)}, but this router runs {_pair(models)}: its "
        "thresholds would mean nothing here. Calibrate one for this pair, set policy='none' (token confidence), or set "
        "allow_foreign_policy=true to use it as it is.",
        param="policy",
    )


def check_quality(gates: Gates, quality: float) -> None:
    """Raise InvalidRequestError if a request asks for a quality that was not calibrated."""
    try:
        gates.check(quality)
    except ConfigurationError as error:
        raise InvalidRequestError(error.message, param="updraft.quality", code="invalid_value") from error


def _against(gate: int, moment: str, p_gain: float, threshold: float) -> Verdict:
    escalate = not p_gain <= threshold  # NaN escalates
    sign = "above" if escalate else "at most"
    return Verdict(gate, escalate, f"P(gain) {p_gain:.3f} {sign} {threshold:.3f} {moment}", p_gain, threshold)


def _pair(models: dict[str, str]) -> str:
    return f"{models.get('local')} with {models.get('cloud')}"


def _run_view(messages: Sequence[Message], answer: LocalAnswer, signals: Sequence[Signals]) -> RunView:
    from ..classifier.views import RunView  # numpy comes with it

    return RunView.of(messages, answer, signals)
