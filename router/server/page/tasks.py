"""`/updraft/tasks`: the tasks of this router's apps, with their evidence and tiers."""

from __future__ import annotations

import msgspec

from ....protocol.decoding import decode
from ....protocol.errors import NotFoundError
from ....protocol.http.wire import WireResponse
from ...tasks.report import TaskReport
from ...tasks.rules import TASK_QUALITY
from ...tasks.store import Pin
from ..routes.route import RequestContext, Route


class TaskList(msgspec.Struct):
    """The tasks, busiest first."""

    # Whether this router learns tasks.
    learns: bool
    # Quality that licensed tasks keep.
    quality: float
    tasks: list[TaskReport]


class TaskChange(msgspec.Struct, forbid_unknown_fields=True):
    """A change of one task."""

    # Tier of its requests; `auto`: by the evidence.
    pin: Pin


async def tasks(context: RequestContext) -> WireResponse:
    router = context.router
    await router.start()
    if (book := router.tasks) is None:
        return WireResponse.json(TaskList(learns=False, quality=TASK_QUALITY, tasks=[]))
    totals = {}
    if router.config.ledger is not None:
        totals = {total.group: total for total in await router.read_ledger(lambda ledger: ledger.totals("task"))}
    return WireResponse.json(TaskList(learns=True, quality=book.rules.quality, tasks=await book.reports(totals)))


async def change(context: RequestContext) -> WireResponse:
    """Pin a task. Raises NotFoundError for an unknown task, or without learning."""
    await context.router.start()
    if (book := context.router.tasks) is None:
        raise NotFoundError("This router learns no tasks. Set learn = true, a local model and a cloud.")
    await book.pin(context.parameters["task"], decode(context.request.body, TaskChange).pin)
    return await tasks(context)


ROUTES = (
    Route("GET /updraft/tasks", tasks, "the tasks: tier, scores, samples", response_type=TaskList),
    Route("POST /updraft/tasks/{task}", change, "set a task's `pin`: `auto`, `local`, `cloud`", TaskChange, TaskList),
)
