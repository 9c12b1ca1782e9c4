"""Learning in use, around the gates: exploration sends some local answers to the cloud as well, a shadow only watches.

Gates that no longer fit the requests become more cautious and say so.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...protocol.errors import InvalidRequestError
from ...protocol.requests import ConfidenceSignal, Message
from ..tiers.interfaces import LocalAnswer
from .gates import ConfidenceGates, GateDecision, Gates, NoSignalGates, PolicyGates

if TYPE_CHECKING:
    from ...classifier.arrays import Floats
    from ...classifier.calibration.drift import DriftMonitor


class _GatesAround:
    """The common part of gates around other gates, which do the reading."""

    def __init__(self, gates: Gates) -> None:
        self._gates = gates
        self.tokens = gates.tokens

    @property
    def quality(self) -> float | None:
        return self._gates.quality

    @property
    def usual(self) -> Floats | None:
        return self._gates.usual

    def check(self, quality: float | None) -> None:
        self._gates.check(quality)

    def read_ahead(self, messages: Sequence[Message]) -> None:
        self._gates.read_ahead(messages)

    def read_lines(self, answer: str) -> None:
        self._gates.read_lines(answer)


class ExplorationGates(_GatesAround):
    """The gates of a pair with exploration, shadow and caution around them.

    `exploration`: the share of requests sampled at random, whatever they ask: gates 1 and 2 only say
    what they would do, and the finished local answer escalates after gate 3. `shadow`: all are. `monitor`: None where
    there is nothing to compare requests with.
    """

    def __init__(
        self,
        gates: Gates,
        *,
        exploration: float = 0.0,
        shadow: bool = False,
        monitor: DriftMonitor | None = None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(gates)
        self._shadow = shadow
        self._exploration = 1.0 if shadow else exploration
        self._observes = True
        self.monitor = monitor
        self._rng = rng or random.Random()

    def check(self, quality: float | None) -> None:
        """Also of the stricter target that holds from an alarm on, which may come at any time."""
        super().check(quality)
        if self.monitor is not None:
            self._gates.check(self._stricter(quality))

    def begin(self) -> Gates:
        explores = self._rng.random() < self._exploration
        return _SampledGates(self, self._exploration, "shadow" if self._shadow else "exploration") if explores else self

    def around(self, gates: Gates) -> ExplorationGates:
        """The same exploration around other gates. Raises InvalidRequestError where there is nothing to go by."""
        if isinstance(self._gates, NoSignalGates):
            raise InvalidRequestError(
                "updraft.confidence needs log-probabilities, and the local server gives none: leave it out.",
                param="updraft.confidence",
            )
        return ExplorationGates(gates, exploration=self._exploration, shadow=self._shadow, rng=self._rng)

    def unobserved(self) -> ExplorationGates:
        """The same gates for a request that is no user's: it is not sampled, and no drift is seen in it."""
        gates = ExplorationGates(self._gates, monitor=self.monitor)
        gates._observes = False
        return gates

    def follow(self, before: Gates | None, *, learns: bool) -> None:
        """Take the place of the gates `before`. By the same calibration, they go on with its drift; nothing is explored
        where nobody `learns`.
        """
        if isinstance(before, ExplorationGates) and self.monitor is not None and before.monitor is not None:
            self.monitor = before.monitor if self.monitor.has_calibration_of(before.monitor) else self.monitor
        if not learns:
            self.stop_exploring()

    @property
    def calibrated(self) -> PolicyGates | None:
        """The gates of a calibrated policy, where these go by one."""
        return self._gates if isinstance(self._gates, PolicyGates) else None

    def stop_exploring(self) -> bool:
        """Nobody learns from what is drawn: draw no more. Whether any was; a shadow looks on all the same."""
        if self._shadow or not self._exploration:
            return False
        self._exploration = 0.0
        return True

    def before(self, messages: Sequence[Message], quality: float | None) -> GateDecision:
        decision = self._with_alarm_noted(self._gates.before(messages, self._quality(quality)))
        if self.monitor is not None and self._observes and decision.p_gain is not None:
            self.monitor.observe(decision.p_gain)
        return decision

    def during(self, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:
        return self._with_alarm_noted(self._gates.during(messages, answer, self._quality(quality)))

    def after(self, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:
        decision = self._with_alarm_noted(self._gates.after(messages, answer, self._quality(quality)))
        return replace(decision, propensity=1.0 if decision.escalate else self._exploration)

    def _quality(self, quality: float | None) -> float | None:
        """The quality to decide by: after an alarm only half of what was to be given up is."""
        return quality if self.monitor is None or self.monitor.alarm is None else self._stricter(quality)

    def _stricter(self, quality: float | None) -> float | None:
        from ...classifier.calibration.drift import stricter

        wanted = self._gates.quality if quality is None else quality
        return None if wanted is None else stricter(wanted)

    def _with_alarm_noted(self, decision: GateDecision) -> GateDecision:
        if self.monitor is None or self.monitor.alarm is None:
            return decision
        return replace(decision, reason=f"cautious, {self.monitor.alarm}: {decision.reason}")


def by_confidence(gates: Gates, confidence: float, signal: ConfidenceSignal) -> Gates:
    """The gates of one request that asks for the plain cascade; a shadow still looks on."""
    plain = ConfidenceGates(confidence, signal)
    return gates.around(plain) if isinstance(gates, ExplorationGates) else plain


class _SampledGates(_GatesAround):
    """The gates of one request that is to be graded whatever they think of it. `chance`: with which it was drawn."""

    def __init__(self, gates: ExplorationGates, chance: float, why: str) -> None:
        super().__init__(gates)
        self._chance = chance
        self._why = why
        self._early = False  # whether gate 1 or 2 would have sent it up, so that nothing had been seen of it

    def begin(self) -> Gates:
        return self

    def before(self, messages: Sequence[Message], quality: float | None) -> GateDecision:
        return self._observed_only(self._gates.before(messages, quality))

    def during(self, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:
        return self._observed_only(self._gates.during(messages, answer, quality))

    def after(self, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:
        decision = self._gates.after(messages, answer, quality)
        alone = decision.escalate and not self._early
        relabelled = self._relabelled(decision, up=decision.escalate or self._early)
        return replace(relabelled, escalate=True, propensity=1.0 if alone else self._chance)

    def _observed_only(self, decision: GateDecision) -> GateDecision:
        self._early = self._early or decision.escalate
        return replace(self._relabelled(decision, up=decision.escalate), escalate=False)

    def _relabelled(self, decision: GateDecision, *, up: bool) -> GateDecision:
        reason = f"{self._why}: would {'escalate' if up else 'answer locally'}, {decision.reason}"
        return replace(decision, reason=reason, exploration_chance=self._chance)
