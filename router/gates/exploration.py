"""Gates that collect training data: for a random sample of requests, the cloud also answers (exploration).

Shadow mode samples every request. If requests drift away from the calibration data, the gates escalate more often.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...protocol.errors import InvalidRequestError
from ...protocol.requests import ConfidenceSignal, Message
from ..tiers.interfaces import LocalAnswer
from .gates import ConfidenceGates, GateDecision, Gates, NoPolicyGates, NoSignalGates, PolicyGates

if TYPE_CHECKING:
    from ...classifier.arrays import Floats
    from ...classifier.calibration.drift import DriftMonitor


class _WrappingGates(Gates):
    """Base class of gates that wrap other gates. Methods that decide nothing are delegated to the wrapped gates."""

    def __init__(self, gates: Gates) -> None:
        self._gates = gates
        self.tokens = gates.tokens

    @property
    def quality(self) -> float | None:
        return self._gates.quality

    @property
    def typical_p_gain(self) -> Floats | None:
        return self._gates.typical_p_gain

    def check(self, quality: float | None) -> None:
        self._gates.check(quality)

    def read_ahead(self, messages: Sequence[Message]) -> None:
        self._gates.read_ahead(messages)

    def read_lines(self, answer: str) -> None:
        self._gates.read_lines(answer)


class ExplorationGates(_WrappingGates):
    """Gates of a pair of models, extended by exploration, shadow mode and caution after drift.

    `exploration`: share of requests sampled at random. For a sampled request, gates 1 and 2 only record what they
    would decide, and the finished local answer escalates after gate 3. `shadow`: sample every request. `monitor`: drift
    monitor, or None if the policy has no calibration data to compare requests with.
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
        """Check the target, and also the stricter target that applies after a drift alarm."""
        super().check(quality)
        if self.monitor is not None:
            self._gates.check(self._stricter(quality))

    def begin(self) -> Gates:
        explores = self._rng.random() < self._exploration
        return _SampledGates(self, self._exploration, "shadow" if self._shadow else "exploration") if explores else self

    def around(self, gates: Gates) -> ExplorationGates:
        """Return `gates` wrapped in the same exploration. Raises InvalidRequestError if the server sends no signals."""
        if isinstance(self._gates, NoSignalGates):
            raise InvalidRequestError(
                "updraft.confidence needs log-probabilities, but the local server has none. Omit updraft.confidence.",
                param="updraft.confidence",
            )
        return ExplorationGates(gates, exploration=self._exploration, shadow=self._shadow, rng=self._rng)

    def unobserved(self) -> ExplorationGates:
        """Return gates for a request that no user sent. Such a request is not sampled and does not count for drift."""
        gates = ExplorationGates(self._gates, monitor=self.monitor)
        gates._observes = False
        return gates

    def follow(self, before: Gates | None, *, learns: bool) -> None:
        """Replace the previous gates, `before`, and keep their drift monitor if the calibration is the same. `learns`:
        whether samples are stored for learning. If False, exploration stops."""
        if isinstance(before, ExplorationGates) and self.monitor is not None and before.monitor is not None:
            self.monitor = before.monitor if self.monitor.has_calibration_of(before.monitor) else self.monitor
        if not learns:
            self.stop_exploring()

    @property
    def has_policy(self) -> bool:
        """Return whether a policy or a threshold may keep requests on the device."""
        return not isinstance(self._gates, NoPolicyGates)

    @property
    def calibrated(self) -> PolicyGates | None:
        """Gates of the calibrated policy, or None if there is no policy."""
        return self._gates if isinstance(self._gates, PolicyGates) else None

    def stop_exploring(self) -> bool:
        """Stop random sampling, because samples are not stored. Return whether it was on. Shadow mode stays on."""
        if self._shadow or not self._exploration:
            return False
        self._exploration = 0.0
        return True

    def judge(self, gate: int, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:
        decision = self._add_alarm(self._gates.judge(gate, messages, answer, self._quality(quality)))
        if gate == 1 and self.monitor is not None and self._observes and decision.p_gain is not None:
            self.monitor.observe(decision.p_gain)
        if gate < 3:
            return decision
        return replace(decision, propensity=1.0 if decision.escalate else self._exploration)

    def _quality(self, quality: float | None) -> float | None:
        """Return the quality target to use. A drift alarm halves the permitted loss of quality."""
        return quality if self.monitor is None or self.monitor.alarm is None else self._stricter(quality)

    def _stricter(self, quality: float | None) -> float | None:
        from ...classifier.calibration.drift import stricter

        wanted = self._gates.quality if quality is None else quality
        return None if wanted is None else stricter(wanted)

    def _add_alarm(self, decision: GateDecision) -> GateDecision:
        if self.monitor is None or self.monitor.alarm is None:
            return decision
        return replace(decision, reason=f"cautious, {self.monitor.alarm}: {decision.reason}")


def by_confidence(gates: Gates, confidence: float, signal: ConfidenceSignal) -> Gates:
    """Return gates for a request that sets its own confidence threshold. Exploration and shadow mode still apply."""
    plain = ConfidenceGates(confidence, signal)
    return gates.around(plain) if isinstance(gates, ExplorationGates) else plain


class _SampledGates(_WrappingGates):
    """Gates of one sampled request, which always escalates after gate 3. `chance`: probability of being sampled."""

    def __init__(self, gates: ExplorationGates, chance: float, why: str) -> None:
        super().__init__(gates)
        self._chance = chance
        self._why = why
        self._early = False  # whether gate 1 or 2 would have escalated, before the answer was complete

    def judge(self, gate: int, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:
        decision = self._gates.judge(gate, messages, answer, quality)
        if gate < 3:
            self._early = self._early or decision.escalate
            return replace(self._relabelled(decision, up=decision.escalate), escalate=False)
        alone = decision.escalate and not self._early
        relabelled = self._relabelled(decision, up=decision.escalate or self._early)
        return replace(relabelled, escalate=True, propensity=1.0 if alone else self._chance)

    def _relabelled(self, decision: GateDecision, *, up: bool) -> GateDecision:
        reason = f"{self._why}: would {'escalate' if up else 'answer on the device'}, {decision.reason}"
        return replace(decision, reason=reason, exploration_chance=self._chance)
