"""Gates of a request whose task is licensed for the device, or pinned to a tier by the user."""

from __future__ import annotations

from collections.abc import Sequence

from ...classifier.licences.answer_policies import AnsweredRequest, features_of
from ...classifier.licences.task_learner import Licence
from ...protocol.requests import Message
from ..gates.gates import GateDecision, Gates, run_view
from ..tiers.interfaces import LocalAnswer
from .book import TaskTurn


class TaskGates(Gates):
    """Gates that keep what the licence keeps. The whole answer is judged, so a stream waits for it.

    `licence`: None keeps every answer without a visible fault, because the user pinned the task.
    """

    tokens = 2**31

    def __init__(self, task: str, licence: Licence[AnsweredRequest] | None) -> None:
        self._task = task
        #: Whether the user pinned the task, which precedes all evidence.
        self.is_pin = licence is None
        self._licence = licence

    def check(self, quality: float | None) -> None:
        """Accept any target: requests with their own target are not decided by their task."""

    def judge(self, gate: int, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> GateDecision:  # noqa: ARG002
        if self._licence is None:
            return GateDecision(gate, escalate=False, reason=f"task {self._task} is pinned to the device")
        if gate < 3:
            return GateDecision(gate, escalate=False, reason=f"task {self._task} is licensed for the device")
        request = AnsweredRequest(features_of(run_view(messages, answer, answer.signals)), is_faulty=False)
        keeps = self._licence.keeps(request)
        said = "is within" if keeps else "is not within"
        return GateDecision(3, escalate=not keeps, reason=f"the answer {said} the licence of task {self._task}")


def gates_of(turn: TaskTurn) -> TaskGates | None:
    """Return the gates that the task prescribes; None if the router's own gates decide."""
    if turn.pin == "local" or turn.licence is not None:
        return TaskGates(turn.label, turn.licence)
    return None


def cloud_decision(turn: TaskTurn) -> GateDecision | None:
    """Return the decision for the cloud if the task demands it before any gate, else None."""
    if turn.pin == "cloud":
        return GateDecision(0, escalate=True, reason=f"task {turn.label} is pinned to the cloud")
    if not turn.is_sampled:
        return None
    why = "keeps proving its licence" if turn.licence is not None else "has no licence for the device yet"
    reason = f"task {turn.label} {why}: both tiers answer, and the answers are compared"
    return GateDecision(0, escalate=True, reason=reason, exploration_chance=turn.chance)
