"""Collector of judged requests in the experience database, from which `updraft learn` fits the gates again."""

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
    from ...classifier.online.experience import ExperienceStore, Observation
    from ...text.tool_stream import AnswerParser

log = logging.getLogger("updraft.router")

# Smallest share of the draft that the cloud must accept so that the local answer counts as equal to the cloud's.
_ACCEPTED_SHARE = 0.9
# Maximum number of answers waiting to be stored, so that a stalled disk cannot fill the memory with texts.
MAX_WAITING = 256
# Maximum seconds to wait for another writing process, and, at shutdown, until all answers are stored.
BUSY_S = 5.0


def pair_name(models: dict[str, str]) -> str:
    """Return the name of a pair of models in the experience database."""
    return f"{models['local']} with {models['cloud']}"


@dataclass(frozen=True, slots=True)
class JudgedRequest:
    """A request with a finished local answer that gate 3 judged."""

    record: RequestRecord
    messages: Sequence[Message]
    answer: LocalAnswer
    # Cloud's answer, if it is known and can be compared with the local answer.
    cloud: ComparableAnswer | None = None
    # Parser that separates reasoning and tool calls from the local text; None for plain text.
    reader: AnswerParser | None = None
    # Whether the cloud's answer was streamed and therefore not kept.
    streamed: bool = True
    # Drift monitor of the gates that judged the answer.
    monitor: DriftMonitor | None = None


@dataclass(frozen=True, slots=True)
class LearningCounts:
    """Numbers of judged answers: waiting to be stored, stored, dropped because too many waited, and not storable."""

    waiting: int = 0
    kept: int = 0
    dropped: int = 0
    failed: int = 0

    def plus(self, *, waiting: int = 0, kept: int = 0, dropped: int = 0, failed: int = 0) -> LearningCounts:
        return LearningCounts(self.waiting + waiting, self.kept + kept, self.dropped + dropped, self.failed + failed)

    def metrics(self) -> list[Metric]:
        return [
            Metric("updraft_learning_waiting", "gauge", "judged answers waiting to be stored", self.waiting),
            Metric("updraft_learning_kept_total", "counter", "judged answers stored as experience", self.kept),
            Metric(
                "updraft_learning_dropped_total", "counter", "judged answers dropped from a full queue", self.dropped
            ),
            Metric("updraft_learning_failed_total", "counter", "judged answers that could not be stored", self.failed),
        ]


class ExperienceCollector:
    """Collector that stores judged requests on its own thread, so that no request waits for the disk.

    At most `MAX_WAITING` answers wait; further answers are dropped. All waiting answers are stored in one transaction,
    which fails if another process writes for 5 seconds. `explored`: probability that a request is sampled for grading.
    `keep_text`: also store the prompt and the answer.
    """

    def __init__(self, store: ExperienceStore, pair: str, *, explored: float = 0.0, keep_text: bool = False) -> None:
        self._experience = store
        self._explored = explored
        self._pair = pair
        self._keep_text = keep_text
        self._thread = ThreadPoolExecutor(1, "updraft-learner")
        self._lock = threading.Lock()
        self._waiting: list[JudgedRequest] = []
        self._last: Future[None] | None = None  # newest storage task, which the one thread runs last
        self._deadline = math.inf
        self.counts = LearningCounts()

    def observe(self, judged: JudgedRequest) -> None:
        """Queue a request for storage if gate 3 judged its answer. Other requests are ignored. Never waits."""
        if judged.record.decision.gate != 3 or judged.record.decision.propensity is None:
            return
        with self._lock:
            full = self.counts.waiting >= MAX_WAITING
            self.counts = self.counts.plus(dropped=1) if full else self.counts.plus(waiting=1)
            if not full:
                self._waiting.append(judged)
        if not full:
            self._last = self._thread.submit(self._store_waiting)
        elif self.counts.dropped == 1:
            log.warning("judged answers arrive faster than they can be stored: some are dropped (see /metrics)")

    async def feedback(self, request_id: str, *, up: bool) -> bool:
        """Store a thumb up or down. Return whether the answer is stored. Raises OperationalError on a busy database."""
        return await asyncio.wrap_future(self._thread.submit(self._experience.feedback, request_id, up=up))

    async def close(self) -> None:
        """Store the waiting answers, for up to 5 seconds, and close the experience database. Idempotent. Waits without
        `asyncio.to_thread`, since the interpreter refuses to start threads at exit."""
        self._deadline = min(self._deadline, time.monotonic() + BUSY_S)
        try:
            if self._last is not None:
                await asyncio.wait([asyncio.wrap_future(self._last)])
        finally:
            self._thread.shutdown(wait=True)
            self._experience.close()

    def _store_waiting(self) -> None:
        """Store all waiting answers. Do nothing if an earlier call has stored them."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        observations: list[Observation] = []
        for judged in taken:
            try:
                observations.append(self._observation(judged))
            except Exception:
                log.exception("cannot learn from request %s", judged.record.request_id)
        kept = self._store_valid(observations)
        with self._lock:
            self.counts = self.counts.plus(waiting=-len(taken), kept=len(kept), failed=len(taken) - len(kept))
        monitors = {each.record.request_id: each.monitor for each in taken}
        for each in kept:
            monitor = monitors[each.id]
            if monitor is not None and each.grades is not None and each.p_gain is not None:
                monitor.labelled(each.p_gain, each.grades[1] > each.grades[0], each.propensity)

    def _store_valid(self, observations: list[Observation]) -> list[Observation]:
        """Store the observations, and return those that were stored. A faulty observation does not stop the others."""
        if not observations:
            return []
        try:
            self._experience.add(*observations, busy_s=max(0.0, min(BUSY_S, self._deadline - time.monotonic())))
        except sqlite3.OperationalError:
            log.exception("cannot store the experience of %d requests", len(observations))
            return []
        except Exception:
            if len(observations) == 1:
                log.exception("cannot store the experience of request %s", observations[0].id)
                return []
            return [each for one in observations for each in self._store_valid([one])]
        return observations

    def _observation(self, judged: JudgedRequest) -> Observation:
        from ...classifier.features.feature_rows import remembered
        from ...classifier.online.experience import Observation, kept_messages, pack

        record, decision = judged.record, judged.record.decision
        view = run_view(judged.messages, judged.answer, judged.answer.signals)
        proposed = record.cloud.accepted + record.cloud.rejected
        accepted = record.cloud.accepted / proposed if proposed else None
        local, cloud = _grades(judged, accepted)
        counted = record.tier == "cloud" and record.cloud.prompt_tokens > 0  # whether the cloud's usage is known
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
    """Return grades of the local and the cloud's answer, by their agreement or (streams) the accepted draft share."""
    from ...classifier.grading.agreement import grades
    from .comparable_answer import local_comparable_answer

    if judged.record.tier != "cloud":
        return None, None
    if judged.cloud is not None:
        return grades(local_comparable_answer(judged.answer, judged.reader), judged.cloud)
    return (None, None) if accepted is None or not judged.streamed else (float(accepted >= _ACCEPTED_SHARE), 1.0)
