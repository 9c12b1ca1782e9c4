"""Reports on tasks, for `updraft tasks`, the API and the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from ...classifier.licences.answer_policies import AnswerLearner, new_learner
from ...classifier.licences.betting import rows_to_license
from .rules import LearningRules
from .store import Pin, StoredTask, TaskStore

if TYPE_CHECKING:
    from ..accounting.ledger import LedgerTotals

_DELTA = 0.05  # that of a task's first policy: half of the allowed error


class TaskReport(msgspec.Struct, kw_only=True):
    """One task: where its requests go, and why."""

    # Id of the task, as in the ledger.
    task: str
    # Name that the caller or the user gave, else the beginning of the system prompt if texts are stored, else the id.
    label: str
    # Tier for requests that are not sampled: `device` with a licence, else `cloud`.
    tier: Literal["device", "cloud"]
    # Tier to which the user pinned the task; `auto`: the evidence decides.
    pin: Pin
    # Sampled requests, and how many of these have a grade.
    samples: int
    graded: int
    # Mean scores of the device and of the cloud in the sampled requests, from 0 to 1. None without samples.
    local_score: float | None
    cloud_score: float | None
    # Share of the device's answers with a visible fault. None without samples.
    faulty: float | None
    # About how many more samples a licence needs, if they are like the earlier ones. None: more samples cannot help.
    missing: int | None
    # Times that a licence was revoked.
    revocations: int
    # Requests in the ledger, the share that stayed on the device, and US dollars saved. None: unknown.
    requests: int = 0
    local_share: float | None = None
    saved_usd: float | None = None


def reports(
    store: TaskStore,
    rules: LearningRules,
    learners: Mapping[str, AnswerLearner],
    totals: Mapping[str, LedgerTotals],
) -> list[TaskReport]:
    """Return a report on each task, busiest first. `learners` have read all rows. `totals`: of the ledger, by task."""
    counts = store.counts(rules.pair)
    made = [
        _report(task, rules.quality, learners.get(task.id), counts.get(task.id, (0, 0)), totals.get(task.id))
        for task in store.tasks("joined = ''")
    ]
    return sorted(made, key=lambda report: (-report.requests, -report.samples))


def stored_reports(store: TaskStore, quality: float, totals: Mapping[str, LedgerTotals]) -> list[TaskReport]:
    """Return the reports for the pair of the newest row, computed from the file alone."""
    rules = LearningRules(store.newest_pair(), quality)
    learners: dict[str, AnswerLearner] = {}
    for task in store.tasks("joined = ''"):
        learner = learners[task.id] = new_learner(quality)
        for sample in store.samples(task.id, rules.pair):
            learner.observe(sample.row)
    return reports(store, rules, learners, totals)


def _report(
    task: StoredTask,
    quality: float,
    learner: AnswerLearner | None,
    counted: tuple[int, int],
    total: LedgerTotals | None,
) -> TaskReport:
    rows = [] if learner is None else learner.rows
    is_licensed = learner is not None and learner.licence is not None
    worth = np.array([(row.cloud if row.request.is_faulty else row.local) - quality * row.cloud for row in rows])
    needed = None if is_licensed or not len(worth) else rows_to_license(worth, _DELTA, quality)
    samples, graded = counted
    return TaskReport(
        task=task.id,
        label=task.label,
        tier="device" if task.pin == "local" or (task.pin == "auto" and is_licensed) else "cloud",
        pin=task.pin,
        samples=samples,
        graded=graded,
        local_score=float(np.mean([row.local for row in rows])) if rows else None,
        cloud_score=float(np.mean([row.cloud for row in rows])) if rows else None,
        faulty=float(np.mean([row.request.is_faulty for row in rows])) if rows else None,
        missing=0 if is_licensed else None if needed is None else max(1, needed - len(rows)),
        revocations=0 if learner is None else learner.num_revocations,
        requests=0 if total is None else total.requests,
        local_share=None if total is None else total.local_share,
        saved_usd=None if total is None else total.saved_usd,
    )
