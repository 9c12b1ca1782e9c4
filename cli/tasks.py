"""`updraft tasks`: the tasks that the router has found, their evidence, and their tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from ..protocol.errors import InvalidRequestError
from ..protocol.safety.private_files import has_file
from .ledger.requests import LedgerPath, open_ledger
from .shared import json_output
from .shared.command_line import CommandLine

if TYPE_CHECKING:
    from ..router.tasks.report import TaskReport
    from ..router.tasks.store import TaskStore

app = CommandLine(help="Show and control the tasks of your apps, which `learn = true` moves to the device when proven.")

_SHOWN = 24  # characters of a name

Which = Annotated[str, typer.Argument(metavar="TASK", help="Id or name of the task; see updraft tasks list.")]
Score = Annotated[float, typer.Argument(min=0, max=1, help="Score from 0 (wrong) to 1 (right).")]


@contextmanager
def _store() -> Iterator[TaskStore]:
    from ..router.settings_sources import load_config
    from ..router.tasks.store import TaskStore

    path = load_config().learn
    if path is None or not has_file(path):
        raise InvalidRequestError("No tasks are learned: set learn = true in the settings, and send requests.")
    with closing(TaskStore(path)) as store:
        yield store


@app.command("list")
def list_tasks(ledger: LedgerPath = None, as_json: json_output.Flag = False) -> None:
    """List the tasks: tier, requests, local share, samples, mean scores of both tiers, and what a licence needs.

    A task without a name is shown by its id, or by the beginning of its system prompt if texts are stored.

    \b
    Examples
      updraft tasks list
      updraft tasks list --json
    """
    from ..router.settings_sources import load_config
    from ..router.tasks.report import stored_reports
    from ..router.tasks.rules import TASK_QUALITY

    config = load_config()
    quality = TASK_QUALITY if config.quality is None else config.quality
    totals = {}
    if (path := ledger or config.ledger) is not None and has_file(path):
        with open_ledger(ledger) as opened:
            totals = {total.group: total for total in opened.totals("task")}
    with _store() as store:
        task_reports = stored_reports(store, quality, totals)
    if as_json:
        json_output.show(msgspec.to_builtins(task_reports))
        return
    from rich.markup import escape

    from ..router.accounting.explanation import printable
    from .shared.console import Console
    from .shared.tables import columns, number

    figures = ("requests", "local", "samples", "device", "cloud")
    table = columns("task", "tier", *figures, "licence", right=figures)
    for each in task_reports:
        table.add_row(
            escape(printable(each.label[:_SHOWN])),
            each.tier if each.pin == "auto" else f"{each.tier}, pinned",
            f"{each.requests:,}",
            number(each.local_share, ".0%"),
            f"{each.samples:,}",
            number(each.local_score, ".2f"),
            number(each.cloud_score, ".2f"),
            _licence(each, quality),
        )
    Console(highlight=False).print(table)


def _licence(report: TaskReport, quality: float) -> str:
    if report.missing == 0:
        return "proven"
    if report.missing is not None:
        return f"about {report.missing:,} more"
    if report.samples and not report.graded:
        return "needs your grades"
    return f"below {quality:g}" if report.samples else "no samples"


@app.command()
def show(
    which: Which,
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="Number of newest requests to list.")] = 20,
    as_json: json_output.Flag = False,
) -> None:
    """List a task's newest sampled requests, with the scores of both tiers and who graded.

    \b
    Example
      updraft tasks show invoices -n 50
    """
    from rich.markup import escape

    from ..router.accounting.explanation import printable
    from .shared.console import Console
    from .shared.tables import columns
    from .shared.tables import number as shown

    with _store() as store:
        task = store.task(which)
        samples = store.samples(task.id, store.newest_pair())[-number:]
    if as_json:
        facts = ("request", "at", "local", "cloud", "grader", "fault")
        json_output.show([{fact: getattr(each, fact) for fact in facts} for each in samples])
        return
    table = columns("request", "device", "cloud", "grader", "fault", right=("device", "cloud"), fold=True)
    for each in samples:
        scores = shown(each.local, ".2f"), shown(each.cloud, ".2f")
        table.add_row(each.request, *scores, each.grader or "none", escape(printable(each.fault)))
    Console(highlight=False).print(table)


@app.command()
def name(
    which: Which,
    new_name: Annotated[str, typer.Argument(metavar="NAME", help="New name.")],
    as_json: json_output.Flag = False,
) -> None:
    """Give a task a name."""
    with _store() as store:
        task = store.task(which).id
        store.rename(task, new_name)
    json_output.tell({"task": task, "name": new_name}, f"Task {which} is now {new_name}.", as_json=as_json)


@app.command()
def pin(
    which: Which,
    tier: Annotated[Literal["local", "cloud", "auto"], typer.Argument(help="auto: by the evidence.")],
    as_json: json_output.Flag = False,
) -> None:
    """Pin a task to a tier, whatever its evidence. Answers with a visible fault still go to the cloud.

    \b
    Examples
      updraft tasks pin invoices cloud
      updraft tasks pin invoices auto
    """
    with _store() as store:
        task = store.task(which).id
        store.set_pin(task, tier)
    told = f"Task {which}: {tier}. Running routers apply this within seconds."
    json_output.tell({"task": task, "pin": tier}, told, as_json=as_json)


@app.command()
def merge(
    which: Which,
    into: Annotated[str, typer.Argument(help="Task that gets all samples.")],
    as_json: json_output.Flag = False,
) -> None:
    """Merge a task into another one, for example because a system prompt was reworded."""
    with _store() as store:
        task, whole = store.task(which).id, store.task(into).id
        store.join(task, whole)
    json_output.tell({"task": task, "into": whole}, f"Task {which} is now part of {into}.", as_json=as_json)


@app.command()
def grade(
    request_id: Annotated[str, typer.Argument(help="Id of a sampled request; see updraft tasks show.")],
    local: Score,
    cloud: Score,
    as_json: json_output.Flag = False,
) -> None:
    """Grade both answers to a sampled request. Your grade replaces any other; the licence is computed again.

    \b
    Example
      updraft tasks grade chatcmpl-0123456789abcdef 1 1
    """
    with _store() as store:
        task = store.correct(request_id, local, cloud)
    told = f"Graded {request_id}: device {local:g}, cloud {cloud:g}, task {task}."
    json_output.tell({"task": task, "request": request_id, "local": local, "cloud": cloud}, told, as_json=as_json)


@app.command()
def forget(which: Which, as_json: json_output.Flag = False) -> None:
    """Delete a task's samples, so that its licence must be proven anew, for example after a change of its app."""
    with _store() as store:
        task = store.task(which).id
        store.forget(task)
    json_output.tell({"task": task}, f"The samples of task {which} are deleted.", as_json=as_json)
