"""Keeps, beside the requests, what was seen and answered, so that gates can be fitted to it later."""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...protocol.http.prometheus import Metric
from ...protocol.requests import Message
from ..accounting.request_record import RequestRecord
from ..gates.gates import run_view
from ..tiers.interfaces import LocalAnswer

if TYPE_CHECKING:
    from ...classifier.calibration.drift import DriftMonitor
    from ...classifier.grading.agreement import ComparableAnswer
    from ...classifier.online.experience import Experience, Observation
    from ...text.tool_stream import AnswerParser

log = logging.getLogger("updraft.router")

# A draft of which less was taken over is another answer.
_TAKEN_OVER = 0.9
# Each waiting answer holds its texts; a disk that stands still must not fill the memory with them.
MAX_WAITING = 256
# How long to wait for another process that writes into the experience, and in all for what waits at the end.
BUSY_S = 5.0


def pair_name(models: dict[str, str]) -> str:
    """The name of a pair in experience."""
    return f"{models['local']} with {models['cloud']}"


@dataclass(frozen=True, slots=True)
class JudgedRequest:
    """A request with a finished local answer that gate 3 judged."""

    record: RequestRecord
    messages: Sequence[Message]
    answer: LocalAnswer
    # The cloud's answer, if it is known and can be compared.
    cloud: ComparableAnswer | None = None
    # Tells thoughts and calls of the local answer from its text; None where it has neither.
    reader: AnswerParser | None = None
    # The cloud's answer went by in pieces and was not kept.
    streamed: bool = True
    # Of the gates that judged it.
    monitor: DriftMonitor | None = None


@dataclass(frozen=True, slots=True)
class LearningCounts:
    """Counts of the answers that gate 3 judged: waiting to be kept, kept, dropped as too many waited, failed."""

    waiting: int = 0
    kept: int = 0
    dropped: int = 0
    failed: int = 0

    def plus(self, *, waiting: int = 0, kept: int = 0, dropped: int = 0, failed: int = 0) -> LearningCounts:
        return LearningCounts(self.waiting + waiting, self.kept + kept, self.dropped + dropped, self.failed + failed)

    def metrics(self) -> list[Metric]:
        return [
            Metric("updraft_learning_waiting", "gauge", "judged answers that wait to be kept", self.waiting),
            Metric("updraft_learning_kept_total", "counter", "judged answers kept as experience", self.kept),
            Metric(
                "updraft_learning_dropped_total", "counter", "judged answers dropped, as too many waited", self.dropped
            ),
            Metric("updraft_learning_failed_total", "counter", "judged answers that could not be kept", self.failed),
        ]


class ExperienceCollector:
    """Keeps what was seen, on a thread of its own: no request waits for it.

    At most `MAX_WAITING` answers wait to be kept; what comes while as many do is dropped and counted. All that waits
    is kept in one transaction; where another process writes for 5 seconds, it is counted as failed. `explored`: the
    chance with which a request is sampled to be graded. `keep_text`: keep prompt and answer too.
    """

    def __init__(self, experience: Experience, pair: str, *, explored: float = 0.0, keep_text: bool = False) -> None:
        self._experience = experience
        self._explored = explored
        self._pair = pair
        self._keep_text = keep_text
        self._thread = ThreadPoolExecutor(1, "updraft-learner")
        self._lock = threading.Lock()
        self._waiting: list[JudgedRequest] = []
        self._last: Future[None] | None = None  # with which all of them are done: there is one thread
        self._deadline = math.inf
        self._counts = LearningCounts()

    @property
    def counts(self) -> LearningCounts:
        return self._counts

    def observe(self, judged: JudgedRequest) -> None:
        """Only what gate 3 judged is kept: of other requests there is no whole local answer. Never waits."""
        if judged.record.decision.gate != 3 or judged.record.decision.propensity is None:
            return
        with self._lock:
            full = self._counts.waiting >= MAX_WAITING
            self._counts = self._counts.plus(dropped=1) if full else self._counts.plus(waiting=1)
            if not full:
                self._waiting.append(judged)
        if not full:
            self._last = self._thread.submit(self._keep)
        elif self._counts.dropped == 1:
            log.warning("answers come faster than they can be learned from: some are not kept (see /metrics)")

    async def feedback(self, request_id: str, *, up: bool) -> bool:
        """Keep a thumb; whether that answer is kept. Raises sqlite3.OperationalError where the file stays busy."""
        return await asyncio.wrap_future(self._thread.submit(self._experience.feedback, request_id, up=up))

    async def close(self) -> None:
        """Keep what waits, for which it takes up to 5 seconds, and close the experience. Idempotent.

        Starts no thread that could wait for the learner's: at the interpreter's exit that is refused.
        """
        self._deadline = min(self._deadline, time.monotonic() + BUSY_S)
        try:
            if self._last is not None:
                await asyncio.wait([asyncio.wrap_future(self._last)])
        finally:
            self._thread.shutdown(wait=True)
            self._experience.close()

    def _keep(self) -> None:
        """All that waits by now; nothing where an earlier call took it."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        observations = [each for each in map(self._learned, taken) if each is not None]
        kept = self._kept(observations)
        with self._lock:
            self._counts = self._counts.plus(waiting=-len(taken), kept=len(kept), failed=len(taken) - len(kept))
        monitors = {each.record.request_id: each.monitor for each in taken}
        for each in kept:
            monitor = monitors[each.id]
            if monitor is not None and each.grades is not None and each.p_gain is not None:
                monitor.labelled(each.p_gain, each.grades[1] > each.grades[0], each.propensity)

    def _learned(self, judged: JudgedRequest) -> Observation | None:
        try:
            return self._observation(judged)
        except Exception:
            log.exception("request %s could not be learned from", judged.record.request_id)
            return None

    def _kept(self, observations: list[Observation]) -> list[Observation]:
        """Those of them that are kept now: all, where nothing is wrong with the file or one of them."""
        if not observations:
            return []
        try:
            self._experience.add(*observations, busy_s=max(0.0, min(BUSY_S, self._deadline - time.monotonic())))
        except sqlite3.OperationalError:
            log.exception("what %d requests taught could not be kept", len(observations))
            return []
        except Exception:
            if len(observations) == 1:
                log.exception("what request %s taught could not be kept", observations[0].id)
                return []
            return [each for one in observations for each in self._kept([one])]
        return observations

    def _observation(self, judged: JudgedRequest) -> Observation:
        from ...classifier.features.feature_rows import remembered
        from ...classifier.online.experience import Observation, kept_messages, pack

        record, decision = judged.record, judged.record.decision
        view = run_view(judged.messages, judged.answer, judged.answer.signals)
        proposed = record.cloud.accepted + record.cloud.rejected
        accepted = record.cloud.accepted / proposed if proposed else None
        local, cloud = _grades(judged, accepted)
        counted = record.tier == "cloud" and record.cloud.prompt_tokens > 0  # else nobody told
        return Observation(
            id=record.request_id,
            pair=self._pair,
            at=record.timestamp,
            p_gain=decision.p_gain,
            propensity=decision.propensity or 0.0,
            explored=self._explored,
            local=local,
            cloud=cloud,
            accepted=accepted,
            cloud_read=record.cloud.prompt_tokens if counted else None,
            cloud_written=record.cloud.completion_tokens if counted else None,
            answered_by=record.tier,
            features=pack(remembered(view)),
            sampled=int(decision.exploration_chance > 0),
            messages=kept_messages(judged.messages) if self._keep_text else None,
            answer=view.answer if self._keep_text else None,
            question=self._experience.digest(view.prompt),
            reply=judged.cloud.text if self._keep_text and judged.cloud is not None else None,
        )


def _grades(judged: JudgedRequest, accepted: float | None) -> tuple[float | None, float | None]:
    """By agreement; of a stream, whose text is not kept, by the share of the draft that was taken over."""
    from ...classifier.grading.agreement import grades
    from .comparable_answer import local_comparable_answer

    if judged.record.tier != "cloud":
        return None, None
    if judged.cloud is not None:
        return grades(local_comparable_answer(judged.answer, judged.reader), judged.cloud)
    return (None, None) if accepted is None or not judged.streamed else (float(accepted >= _TAKEN_OVER), 1.0)
