"""Reports on tasks, for `updraft tasks`, the API and the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from ...classifier.licences.answer_policies import new_learner
from ...classifier.licences.betting import rows_to_license
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


def reports(store: TaskStore, quality: float, totals: Mapping[str, LedgerTotals]) -> list[TaskReport]:
    """Return a report on each task, busiest first. `totals`: sums of the ledger by task."""
    pair = store.newest_pair()
    made = [_report(store, task, pair, quality, totals.get(task.id)) for task in store.tasks() if not task.joined]
    return sorted(made, key=lambda report: (-report.requests, -report.samples))


def _report(store: TaskStore, task: StoredTask, pair: str, quality: float, total: LedgerTotals | None) -> TaskReport:
    samples, learner = store.samples(task.id, pair), new_learner(quality)
    for sample in samples:
        learner.observe(sample.row)
    rows = learner.rows
    is_licensed = learner.licence is not None
    worth = np.array([(row.cloud if row.request.is_faulty else row.local) - quality * row.cloud for row in rows])
    needed = None if is_licensed or not len(worth) else rows_to_license(worth, _DELTA, quality)
    return TaskReport(
        task=task.id,
        label=task.label,
        tier="device" if task.pin == "local" or (task.pin == "auto" and is_licensed) else "cloud",
        pin=task.pin,
        samples=len(samples),
        graded=sum(sample.local is not None for sample in samples),
        local_score=float(np.mean([row.local for row in rows])) if rows else None,
        cloud_score=float(np.mean([row.cloud for row in rows])) if rows else None,
        faulty=float(np.mean([row.request.is_faulty for row in rows])) if rows else None,
        missing=0 if is_licensed else None if needed is None else max(1, needed - len(rows)),
        revocations=learner.num_revocations,
        requests=0 if total is None else total.requests,
        local_share=None if total is None else total.local_share,
        saved_usd=None if total is None else total.saved_usd,
    )
