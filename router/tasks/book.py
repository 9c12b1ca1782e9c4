"""The tasks of a running router: their learners, kept up to date with the evidence file."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...classifier.licences.answer_policies import AnsweredRequest, AnswerLearner, new_learner
from ...classifier.licences.task_learner import Licence
from ...protocol.http.prometheus import Metric
from ...protocol.safety.bounded_cache import BoundedCache
from .identity import TaskShape, TaskShapes
from .rules import LearningRules
from .store import Grade, Pin, StoredTask, TaskStore

if TYPE_CHECKING:
    from ..accounting.ledger import LedgerTotals
    from .report import TaskReport

log = logging.getLogger("updraft.router")
#: Maximum number of tasks. Requests of further tasks are not sampled, so that invented names cannot fill the memory.
MAX_TASKS = 10_000
#: Maximum number of sampled requests that wait for their grades, so that a slow device grades them in time. Further
#: requests are not sampled.
MAX_WAITING = 16
#: Number of recent requests that are recognised when they are sent again.
_RECENT = 1_000
#: Minimum seconds between looks, which requests trigger, for changes by other processes, such as `updraft tasks pin`.
REFRESH_S = 2.0


@dataclass(frozen=True, slots=True)
class TaskTurn:
    """Demands of a task on one request."""

    # Id of the task, and its name (without a name: its id).
    task: str
    label: str
    # Whether both tiers answer the request, so that their answers are compared.
    is_sampled: bool
    # Probability with which the request was sampled, given the task and the past.
    chance: float
    # Licence of the device. None: the router's own gates decide.
    licence: Licence[AnsweredRequest] | None = None
    # Tier to which the user pinned the task.
    pin: Pin = "auto"


@dataclass(slots=True)
class _Evidence:
    """A task's learner, as far as the task's rows were read."""

    learner: AnswerLearner
    # Number of the last row that the learner has seen.
    seq: int = 0
    # Changes of earlier rows that the learner has seen.
    changes: int = 0


@dataclass(frozen=True, slots=True)
class _Standing:
    """Facts on a task for its next decision."""

    licence: Licence[AnsweredRequest] | None = None
    # Probability with which to sample the next request.
    chance: float = 1.0
    pin: Pin = "auto"
    # Name of the task, or an empty string.
    name: str = ""


class TaskBook:
    """Tasks of one router. `turn` never waits for the disk: one thread writes, and reads the rows of other processes.
    Without a usable file, tasks keep their standing, and failures are logged."""

    def __init__(self, store: TaskStore, rules: LearningRules, rng: random.Random | None = None) -> None:
        self.shapes = TaskShapes()
        self._store = store
        #: Settings by which this book was made.
        self.rules = rules
        self._rng = rng or random.Random()
        self._seen: set[str] = set()
        self._graded = 0
        self._is_closed = False
        self._refreshed = time.monotonic()
        self._version = -1  # of the file, as of the last refresh
        self._recent: BoundedCache[bytes, bool] = BoundedCache(_RECENT)
        self._begun: set[str] = set()  # waiting requests that the device answers now
        self._waiting: dict[str, TaskTurn] = {}  # sampled requests without a grade, by request id
        # The thread replaces entries of these, and owns `_evidence`.
        self._standings: dict[str, _Standing] = {}
        self._joined: dict[str, str] = {}
        self._evidence: dict[str, _Evidence] = {}
        self._thread = ThreadPoolExecutor(1, "updraft-tasks")

    def turn(self, shape: TaskShape, digest: bytes, *, counts: bool = True) -> TaskTurn:
        """Return what the task demands of a request. `digest`: of its messages, because a request that is sent again
        counts once. `counts`: whether a user sent the request, so that it may be sampled. It is sampled at random
        before any gate reads it, so the sampled rows stand for all of the task's.
        """
        own = self._store.id_of(shape)
        is_known = own in self._standings or own in self._joined or own in self._seen
        if not is_known and len(self._standings) + len(self._joined) + len(self._seen) >= MAX_TASKS:
            return TaskTurn(own, shape.name or own, is_sampled=False, chance=0.0)
        if counts and not is_known:
            self._seen.add(own)
            self._submit(lambda: self._begin_task(own, shape))
        if time.monotonic() > self._refreshed + REFRESH_S:
            self._refreshed = time.monotonic()
            self._submit(self._refresh)
        task = self._joined.get(own, own)
        standing = self._standings.get(task, _Standing())
        label = standing.name or shape.name or task
        if standing.pin != "auto":
            return TaskTurn(task, label, is_sampled=False, chance=0.0, pin=standing.pin)
        chance = standing.chance
        if standing.licence is None and self.rules.has_gates:
            chance = self.rules.exploration
        is_new = counts and self._recent.get(digest) is None
        is_sampled = is_new and len(self._waiting) < MAX_WAITING and self._rng.random() < chance
        if counts:
            self._recent.put(digest, True)
        return TaskTurn(task, label, is_sampled, chance, standing.licence)

    def awaits(self, request: str) -> bool:
        """Return whether a request was sampled and waits for its grade."""
        return request in self._waiting

    def begin(self, turn: TaskTurn, request: str) -> None:
        """Store a sampled request before it is answered."""
        self._waiting[request] = turn
        self._submit(lambda: self._store.begin(turn.task, self.rules.pair, request))

    def begun(self, request: str) -> None:
        """Note that the device answers a waiting request, which can no longer be forgotten."""
        self._begun.add(request)

    def drop(self, *requests: str) -> None:
        """Forget sampled requests that the cloud did not answer."""
        for request in requests:
            self._waiting.pop(request, None)
            self._begun.discard(request)
        self._submit(lambda: self._store.drop(requests))

    async def grade(self, request: str, grade: Grade) -> None:
        """Store the grade of a waiting request, and let its task's learner see it."""
        turn = self._waiting.pop(request, None)
        self._begun.discard(request)
        if turn is None:  # forgotten when the book was closed
            return
        self._graded += 1

        def work() -> None:
            self._store.grade(request, grade)
            self._read_task(turn.task)

        await asyncio.wrap_future(self._submit(work))

    def metrics(self) -> list[Metric]:
        licensed = sum(standing.licence is not None for standing in self._standings.values())
        return [
            Metric("updraft_tasks", "gauge", "tasks with evidence", len(self._standings)),
            Metric("updraft_tasks_licensed", "gauge", "tasks that the device may answer", licensed),
            Metric("updraft_tasks_graded_total", "counter", "sampled requests graded by this process", self._graded),
        ]

    async def pin(self, task: str, pin: Pin) -> None:
        """Pin a task to a tier. Raises NotFoundError."""

        def work() -> None:
            stored = self._store.task(task)
            self._store.set_pin(stored.id, pin)
            self._read(replace(stored, pin=pin))

        await asyncio.wrap_future(self._thread.submit(work))

    async def reports(self, totals: Mapping[str, LedgerTotals]) -> list[TaskReport]:
        """Return a report on each task. `totals`: sums of the ledger by task."""
        from .report import reports

        def work() -> list[TaskReport]:
            self._refresh()
            learners = {task: each.learner for task, each in self._evidence.items()}
            return reports(self._store, self.rules, learners, totals)

        return await asyncio.wrap_future(self._thread.submit(work))

    async def refresh(self) -> None:
        """Read what the file has: at the start, and after another process has changed it."""
        await asyncio.wrap_future(self._submit(self._refresh))

    def close(self) -> None:
        """Forget the waiting requests that the device has not begun, finish all writes and close the file.
        Idempotent."""
        if forgotten := self._waiting.keys() - self._begun:
            self.drop(*forgotten)
        self._thread.shutdown(wait=True)
        self._is_closed = True
        self._store.close()

    def _submit(self, work: Callable[[], object]) -> Future[None]:
        def safely() -> None:
            try:
                work()
            except Exception:  # answers do not depend on it
                log.exception("cannot store or read the evidence of tasks in %s", self._store.path)

        try:
            return self._thread.submit(safely)
        except RuntimeError:  # the interpreter exits, or the book is closed
            if not self._is_closed:
                self._thread.shutdown()  # the queued work precedes this
                safely()
            done = Future[None]()
            done.set_result(None)
            return done

    def _begin_task(self, task: str, shape: TaskShape) -> None:
        try:
            self._store.add_task(task, shape, keep_text=self.rules.keep_text)
            self._read_task(task)
        finally:
            self._seen.discard(task)  # known from now on, or stored at its next request

    def _refresh(self) -> None:
        """Bring the learners of all tasks up to date, if another process has changed the file."""
        if (version := self._store.version) == self._version:
            return
        stored = self._store.tasks()
        self._joined = {task.id: task.joined for task in stored if task.joined}
        for task in stored:
            if not task.joined:
                self._read(task)
        for deleted in self._standings.keys() - {task.id for task in stored}:
            del self._standings[deleted]
            self._evidence.pop(deleted, None)
        self._version = version

    def _read_task(self, task: str) -> None:
        if (stored := self._store.by_id(self._joined.get(task, task))) is not None:
            self._read(stored)

    def _read(self, task: StoredTask) -> None:
        if task.joined:  # merged into another task since the last refresh
            self._joined = {**self._joined, task.id: task.joined}
            return
        evidence = self._evidence.get(task.id)
        if evidence is None or evidence.changes != task.changes:
            evidence = self._evidence[task.id] = _Evidence(new_learner(self.rules.quality), changes=task.changes)
        learner = evidence.learner
        for sample in self._store.samples(task.id, self.rules.pair, evidence.seq):
            learner.observe(sample.row)
            evidence.seq = sample.seq
        before = self._standings.get(task.id, _Standing())
        now = _Standing(learner.licence, learner.sampling_rate(self.rules.exploration), task.pin, task.name)
        self._standings[task.id] = now
        if (before.licence is None) != (now.licence is None):
            place = "may be answered on the device" if now.licence is not None else "returns to the cloud"
            log.info("task %s %s, after %d sampled requests", task.label, place, len(learner.rows))
