"""`/updraft/tasks`: the tasks of this router's apps, with their evidence and tiers."""

from __future__ import annotations

import msgspec

from ....protocol.errors import NotFoundError
from ....protocol.http.wire import WireResponse
from ...tasks.report import TaskReport
from ..routes.route import RequestContext, Route


class TaskList(msgspec.Struct):
    """The tasks, busiest first."""

    tasks: list[TaskReport]


async def tasks(context: RequestContext) -> WireResponse:
    """Report on the tasks. Raises NotFoundError without learning."""
    router = context.router
    await router.start()
    if (book := router.tasks) is None:
        raise NotFoundError("This router learns no tasks. Set learn = true, a local model and a cloud.")
    totals = {}
    if router.config.ledger is not None:
        totals = {total.group: total for total in await router.read_ledger(lambda ledger: ledger.totals("task"))}
    return WireResponse.json(TaskList(await book.reports(totals)))


ROUTES = (Route("GET /updraft/tasks", tasks, "the tasks: tier, scores and samples", response_type=TaskList),)
