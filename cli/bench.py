"""`updraft bench NAME`: the commands behind the figures in the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options

if TYPE_CHECKING:
    from ..bench.report import Report

app = typer.Typer(
    no_args_is_help=True,
    help="Measure, and print or write the figures with machine, versions and commit. --json PATH writes them.",
)


@app.callback()
def _group() -> None:
    """A group even while it holds one benchmark, so that the name is always given."""


@app.command()
def cascade(
    tasks: Annotated[int, typer.Option(min=1, max=options.MOST_TASKS, help="Held-out pocket tasks.")] = 300,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Questions in flight to the cloud.")] = 8,
    seed: Annotated[int, typer.Option(help="Which of the held-out tasks.")] = 0,
    quality: options.Quality = None,
    json_path: options.Json = None,
) -> None:
    """Quality, cloud share and cost of the packaged pair: local only, cloud only, routed.

    \b
    Example
      updraft bench cascade --tasks 2000 --json out/cascade.json
    """
    from ..bench.questions import pocket_questions
    from ..bench.report import Report
    from .evaluate import measure

    config = options.Pair(local="pocket", quality=quality).config()
    measured = measure(config, pocket_questions(tasks, seed), None, concurrency)
    settings = {"tasks": tasks, "concurrency": concurrency, "seed": seed, "quality": config.quality}
    show(Report.of({"bench": "cascade", **settings}, measured), json_path)


def show(report: Report, path: Path | None) -> None:
    """Print a report as a table, and write it if asked."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report.config['bench']} at {report.commit} on {report.machine['cpu']}")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in report.metrics.items():
        table.add_row(name, f"{value:,.6g}")
    Console().print(table)
    if path is not None:
        report.write(path)
