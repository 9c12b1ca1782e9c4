"""Learning in use, around the gates: what was seen and answered is kept, some of what would stay local is tried in the
cloud, a shadow only looks on, and gates that no longer fit become more cautious and say so.
"""

from __future__ import annotations

import logging
import random
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..protocol.requests import Message
from .gates import Gates, Verdict, run_view
from .record import Record
from .tiers import LocalAnswer

if TYPE_CHECKING:
    from ..classifier.drift import DriftMonitor
    from ..classifier.experience import Experience, Observation
    from ..classifier.metrics import Floats

__all__ = ["Learner", "LearningGates", "Seen", "pair_name"]

log = logging.getLogger("updraft.router")

# A draft of which less was taken over is another answer.
_TAKEN_OVER = 0.9


def pair_name(models: dict[str, str]) -> str:
    """How experience names a pair."""
    return f"{models['local']} with {models['cloud']}"


@dataclass(frozen=True, slots=True)
class Seen:
    """A request with a finished local answer that gate 3 judged, and the cloud's text if it is known."""

    record: Record
    messages: Sequence[Message]
    answer: LocalAnswer
    cloud_text: str | None
    cloud_finish: str = "stop"

    @classmethod
    def of(
        cls, record: Record, messages: Sequence[Message], answer: LocalAnswer, completion: dict[str, Any] | None
    ) -> Seen:
        """`completion`: the cloud's, where it gave a whole one."""
        if completion is None:
            return cls(record, messages, answer, None)
        choice: dict[str, Any] = completion["choices"][0]
        content = choice["message"].get("content") or ""
        text = content if isinstance(content, str) else None  # parts of a message are not told from each other here
        return cls(record, messages, answer, text, choice.get("finish_reason") or "stop")


class Learner:
    """Keeps what was seen, on a thread of its own: no request waits for it.

    `explored`: the least chance that a judged answer has of being graded. `keep_text`: keep prompt and answer too.
    """

    def __init__(
        self,
        experience: Experience,
        pair: str,
        *,
        explored: float = 0.0,
        keep_text: bool = False,
        monitor: DriftMonitor | None = None,
    ) -> None:
        self._experience = experience
        self._explored = explored
        self._pair = pair
        self._keep_text = keep_text
        self._monitor = monitor
        self._thread = ThreadPoolExecutor(1, "updraft-learner")

    def observe(self, seen: Seen) -> None:
        """Only what gate 3 judged is kept: of other requests there is no whole local answer."""
        if seen.record.verdict.gate == 3 and seen.record.verdict.propensity is not None:
            self._thread.submit(self._keep, seen)

    def close(self) -> None:
        """Finish what is waiting. Idempotent."""
        self._thread.shutdown(wait=True)
        self._experience.close()

    def _keep(self, seen: Seen) -> None:
        try:
            observation = self._observation(seen)
            self._experience.add(observation)
        except sqlite3.Error:
            log.exception("what request %s taught could not be kept", seen.record.request_id)
            return
        except Exception:
            log.exception("request %s could not be learned from", seen.record.request_id)
            return
        grades = observation.grades
        if self._monitor is not None and grades is not None and observation.p_gain is not None:
            self._monitor.labelled(observation.p_gain, grades[1] > grades[0], observation.propensity)

    def _observation(self, seen: Seen) -> Observation:
        from ..classifier.experience import Observation, pack
        from ..classifier.text_policy import graded_run
        from ..classifier.text_rows import vector

        record, verdict = seen.record, seen.record.verdict
        view = run_view(seen.messages, seen.answer, seen.answer.signals)
        row = graded_run(view, signals=True)
        accepted = _accepted_share(record)
        local, cloud = _grades(seen, accepted)
        asked = record.tier == "cloud"
        return Observation(
            id=record.request_id,
            pair=self._pair,
            at=record.timestamp,
            p_gain=verdict.p_gain,
            propensity=verdict.propensity or 0.0,
            explored=self._explored,
            local=local,
            cloud=cloud,
            accepted=accepted,
            cloud_read=record.cloud.prompt_tokens if asked else None,
            cloud_written=record.cloud.completion_tokens if asked else None,
            answered_by=record.tier,
            features=pack(vector(row, "cascade")),
            prompt=row.prompt if self._keep_text else None,
            answer=row.answer if self._keep_text else None,
        )


def _accepted_share(record: Record) -> float | None:
    proposed = record.cloud.accepted + record.cloud.rejected
    return record.cloud.accepted / proposed if proposed else None


def _grades(seen: Seen, accepted: float | None) -> tuple[float | None, float | None]:
    """By agreement of the texts; of a stream, whose text is not kept, by the share of the draft that was taken over."""
    from ..classifier.agreement import Said, grades

    if seen.record.tier != "cloud":
        return None, None
    if seen.cloud_text is not None:
        local = Said(seen.answer.text, seen.answer.finish_reason or "stop")
        return grades(local, Said(seen.cloud_text, seen.cloud_finish))
    return (None, None) if accepted is None else (float(accepted >= _TAKEN_OVER), 1.0)


class LearningGates:
    """The gates of a pair with exploration, shadow and caution around them.

    `exploration`: the share of answers that gate 3 would keep, which go up all the same. `shadow`: every answer goes up
    after gate 3, and gates 1 and 2 only say what they would do.
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
        self._gates = gates
        self._exploration = exploration
        self._shadow = shadow
        self.monitor = monitor
        self._rng = rng or random.Random()
        self.tokens = gates.tokens

    def check(self, quality: float | None) -> None:
        self._gates.check(quality)

    @property
    def quality(self) -> float | None:
        return self._gates.quality

    @property
    def usual(self) -> Floats | None:
        return self._gates.usual

    def before(self, messages: Sequence[Message], quality: float | None) -> Verdict:
        verdict = self._cautiously(self._gates.before(messages, self._quality(quality)))
        if self.monitor is not None and verdict.p_gain is not None:
            self.monitor.asked(verdict.p_gain)
        return self._looking_on(verdict)

    def during(self, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> Verdict:
        return self._looking_on(self._cautiously(self._gates.during(messages, answer, self._quality(quality))))

    def after(self, messages: Sequence[Message], answer: LocalAnswer, quality: float | None) -> Verdict:
        verdict = self._cautiously(self._gates.after(messages, answer, self._quality(quality)))
        if self._shadow:
            reason = f"shadow: would {'go up' if verdict.escalate else 'stay'}, {verdict.reason}"
            return replace(verdict, escalate=True, reason=reason, propensity=1.0)
        if verdict.escalate:
            return replace(verdict, propensity=1.0)
        if self._rng.random() < self._exploration:
            return replace(
                verdict, escalate=True, reason=f"exploration: {verdict.reason}", propensity=self._exploration
            )
        return replace(verdict, propensity=self._exploration)

    def _quality(self, quality: float | None) -> float | None:
        """The quality to decide by: after an alarm only half of what was to be given up is."""
        if self.monitor is None or self.monitor.alarm is None:
            return quality
        from ..classifier.drift import stricter

        wanted = self._gates.quality if quality is None else quality
        return None if wanted is None else stricter(wanted)

    def _cautiously(self, verdict: Verdict) -> Verdict:
        if self.monitor is None or self.monitor.alarm is None:
            return verdict
        return replace(verdict, reason=f"cautious, {self.monitor.alarm}: {verdict.reason}")

    def _looking_on(self, verdict: Verdict) -> Verdict:
        """Gates 1 and 2 of a shadow let the local answer come to its end, so that gate 3 has something to judge."""
        if not self._shadow or not verdict.escalate:
            return verdict
        return replace(verdict, escalate=False, reason=f"shadow: would go up, {verdict.reason}")
