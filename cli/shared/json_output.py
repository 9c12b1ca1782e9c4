"""`--json`: the one way in which commands print facts for programs. Standard output then holds nothing else."""

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
        help="Print the figures as JSON and nothing else on standard output. With a PATH they are written there.",
    ),
]


def show(facts: Any) -> None:
    output.echo(output.as_json(facts))


def tell(facts: Any, text: object, *, as_json: bool) -> None:
    """The facts for a program, or the text for a person."""
    output.echo(output.as_json(facts) if as_json else text)


def is_stdout(path: Path | None) -> bool:
    """Whether figures go to standard output, so that all else has to go to standard error."""
    return path == Path(STDOUT)


def write(path: Path | None, facts: Any) -> None:
    """Figures to where `--json` wants them, if it does."""
    from ...bench.shared.report import write_json

    if is_stdout(path):
        show(facts)
    elif path is not None:
        write_json(path, facts)
