"""Learning from requests: judged answers for `updraft learn`, and the tasks of apps.

The device answers a task's sampled request once the cloud has, so that no user waits: a shadow answer. Both answers are
then compared.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..protocol.errors import OverloadedError, UpdraftError
from ..protocol.http import sse
from ..protocol.http.lenient_json import objects_of
from ..protocol.http.prometheus import Metric
from .accounting.request_record import RequestRecord
from .cascade.cascade import Cascade
from .config import RouterConfig
from .factory import load_learner, load_tasks
from .feedback.collector import ExperienceCollector, JudgedRequest, LearningCounts
from .gates.answer_faults import fault_of
from .gates.exploration import ExplorationGates
from .gates.gates import run_view
from .responses.cache import joined
from .state import Tiers

if TYPE_CHECKING:
    from ..classifier.grading.agreement import ComparableAnswer
    from .tasks.book import TaskBook
    from .tasks.store import Grade

log = logging.getLogger("updraft.router")
#: Maximum seconds to wait for shadows at the end, so that short scripts teach their tasks, too.
CLOSE_S = 5.0
_SHADOW_S = 300.0  # maximum duration of a shadow, in seconds
_MAX_FAULT = 200  # characters of a fault in the evidence


class Learning:
    """Learning of one router. Failures are only logged, since they must not harm an answer or its row."""

    def __init__(self) -> None:
        #: Tasks of the running pair; None without the setting `learn`.
        self.tasks: TaskBook | None = None
        self._collector: ExperienceCollector | None = None
        self._cloud_model = ""
        self._answered: set[str] = set()  # sampled requests that wait only for the device
        #: Running shadows.
        self.shadows: set[asyncio.Task[None]] = set()
        self._place = asyncio.Semaphore(1)  # shadows run one after the other, so that the device stays free for users

    async def open(self, config: RouterConfig, tiers: Tiers) -> None:
        """Open the files that the settings name, and replay the evidence of tasks, if both tiers are loaded."""
        self._collector, self._cloud_model = load_learner(config, tiers), config.cloud_model
        await self.open_tasks(config, tiers)

    async def open_tasks(self, config: RouterConfig, tiers: Tiers) -> None:
        """Replay the evidence of tasks by the rules in `config`, unless they are in force already."""
        book = await asyncio.to_thread(load_tasks, config, tiers)
        before = self.tasks
        if book is not None and before is not None and book.rules == before.rules:
            book.close()
        elif book is not None:
            await book.refresh()
            self.tasks = book
            if before is not None:
                before.close()

    @property
    def keeps_experience(self) -> bool:
        return self._collector is not None

    def ended(self, cascade: Cascade, cloud: dict[str, Any] | None, status: int = 200) -> None:
        """Learn from a request that has ended. `cloud`: the cloud's completion; None for a stream or a failure."""
        record = cascade.record
        try:
            if status == 200 and record.cloud_model in ("", self._cloud_model):  # a smaller cloud is another pair
                self._observe(cascade, cloud)
            self._compare(cascade, cloud)
        except Exception:
            log.exception("cannot learn from request %s", record.request_id)

    def observed(self, cascade: Cascade, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """Return the events of a stream unchanged. If the request was sampled, a shadow begins at their end."""
        waits = self.tasks is not None and self.tasks.awaits(cascade.record.request_id)
        return self._assembled(cascade, events) if waits else events

    async def feedback(self, request_id: str, *, up: bool) -> bool:
        """Record feedback for `updraft learn`. Return whether the answer is stored."""
        return self._collector is not None and await self._collector.feedback(request_id, up=up)

    def metrics(self) -> list[Metric]:
        counts = LearningCounts() if self._collector is None else self._collector.counts
        return counts.metrics() + ([] if self.tasks is None else self.tasks.metrics())

    async def close(self) -> None:
        """Store what was learned. A shadow that takes more than `CLOSE_S` is stopped, and counts against the device: to
        forget it would spare slow answers. Shadows that have not begun are forgotten. Idempotent."""
        if self.shadows:
            await asyncio.wait(self.shadows, timeout=CLOSE_S)
        for shadow in self.shadows:
            shadow.cancel()
        await asyncio.gather(*self.shadows, return_exceptions=True)
        collector, self._collector = self._collector, None
        tasks, self.tasks = self.tasks, None
        try:
            if collector is not None:
                await collector.close()
        finally:
            if tasks is not None:
                tasks.close()

    def _observe(self, cascade: Cascade, completion: dict[str, Any] | None) -> None:
        from .feedback.comparable_answer import cloud_comparable_answer

        answer, gates = cascade.judged, cascade.tiers.gates
        if self._collector is None or answer is None or not cascade.ruling.open:
            return
        comparable = None if completion is None else cloud_comparable_answer(completion["choices"][0])
        judged = JudgedRequest(
            cascade.record,
            cascade.chat.messages,
            answer,
            comparable,
            cascade.reader(),
            streamed=completion is None,
            monitor=gates.monitor if isinstance(gates, ExplorationGates) else None,
        )
        self._collector.observe(judged)

    def _compare(self, cascade: Cascade, completion: dict[str, Any] | None) -> None:
        """Begin the shadow of a sampled request, or forget the request if the best cloud gave no whole answer."""
        from .feedback.comparable_answer import cloud_comparable_answer

        request, tasks = cascade.record.request_id, self.tasks
        if tasks is None or not tasks.awaits(request) or request in self._answered:
            return
        choices = objects_of(None if completion is None else completion.get("choices"))
        cloud = cloud_comparable_answer(choices[0]) if choices and cascade.record.tier == "cloud" else None
        if cloud is None:
            tasks.drop(request)
            return
        self._answered.add(request)
        shadow = asyncio.create_task(self._shadow(tasks, cascade, cloud))
        self.shadows.add(shadow)
        shadow.add_done_callback(self.shadows.discard)

    async def _assembled(self, cascade: Cascade, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        raw: list[bytes] = []
        async with aclosing(events):
            async for event in events:
                raw.append(event)
                if event.endswith(sse.DONE):
                    self._compare_stream(cascade, raw)
                yield event

    def _compare_stream(self, cascade: Cascade, raw: list[bytes]) -> None:
        try:
            self._compare(cascade, joined(raw, only_text=False))
        except Exception:  # of an odd chunk, which must not harm the caller's stream
            log.exception("cannot learn from request %s", cascade.record.request_id)

    async def _shadow(self, tasks: TaskBook, cascade: Cascade, cloud: ComparableAnswer) -> None:
        from .tasks.store import Grade

        request = cascade.record.request_id
        try:
            async with self._place, asyncio.timeout(_SHADOW_S):
                tasks.begun(request)
                grade = await _graded(cascade, cloud)
        except TimeoutError:
            grade = Grade(0.0, 1.0, "agreement", fault=f"the device took over {_SHADOW_S:.0f} s")
        except Exception as error:
            if isinstance(error, OverloadedError) or not threading.main_thread().is_alive():
                self._answered.discard(request)
                tasks.drop(request)  # the device is too busy, or the interpreter exits, and libraries raise any error
                return
            if isinstance(error, UpdraftError):  # such as a prompt that is too long for the device
                grade = Grade(0.0, 1.0, "agreement", fault=f"the device failed: {error.message}")
            else:
                log.exception("cannot compare the answers to request %s", request)
                grade = Grade(None, None, "")
        self._answered.discard(request)
        await tasks.grade(request, replace(grade, fault=grade.fault[:_MAX_FAULT]))


async def _graded(answered: Cascade, cloud: ComparableAnswer) -> Grade:
    """Generate the device's answer to a request that the cloud has answered, and grade both answers."""
    from ..classifier.grading.task_grades import graded
    from ..classifier.licences.answer_policies import features_of
    from .feedback.comparable_answer import local_comparable_answer
    from .tasks.store import Grade

    record = RequestRecord(answered.record.prices, answered.record.top_model)
    shadow = Cascade(answered.job, answered.router_state, record)
    run = await shadow.begin_local(0)
    try:
        async for _ in run:
            pass
    finally:
        await run.aclose()
    answer = run.answer
    fault = fault_of(answer, shadow.chat, shadow.tools) or ""
    view = run_view(shadow.chat.messages, answer, answer.signals)
    local = local_comparable_answer(answer, shadow.reader())
    scores = graded(local, cloud)
    return Grade(scores.local, scores.cloud, scores.grader, fault, features_of(view).tobytes())
