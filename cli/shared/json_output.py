"""`--json`, the machine-readable output of commands: standard output then holds JSON and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import output
from .command_line import STDOUT

Flag = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on standard output.")]
File = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="[PATH]",
        help="Print the figures as JSON and nothing else on standard output. With PATH, write the figures to PATH.",
    ),
]


def show(facts: Any) -> None:
    output.echo(output.as_json(facts))


def tell(facts: Any, text: object, *, as_json: bool) -> None:
    """Print `facts` as JSON if `as_json` is set, else `text`."""
    output.echo(output.as_json(facts) if as_json else text)


def is_stdout(path: Path | None) -> bool:
    """Return whether `--json` writes to standard output. All other output must then go to standard error."""
    return path == Path(STDOUT)


def write(path: Path | None, facts: Any) -> None:
    """Write `facts` to the path that `--json` named, or print them; do nothing without `--json`."""
    from ...bench.shared.report import write_json

    if is_stdout(path):
        show(facts)
    elif path is not None:
        write_json(path, facts)
