"""A parameter that is an option group stands for an option per field, but for those that its command goes without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner
from updraft.cli.shared.command_line import CommandLine
from updraft.cli.shared.option_groups import OmittedFields, expanded


@dataclass(frozen=True)
class Colours:
    front: Annotated[str, typer.Option(help="Of the letters.")] = "black"
    back: Annotated[str, typer.Option(help="Of the paper.")] = "white"
    glows: Annotated[bool, typer.Option("--glows", help="In the dark.")] = False


def paint(*, first: int = 1, colours: Annotated[Colours, OmittedFields("back")], last: int = 2) -> None:
    print(first, colours, last)


def test_fields_replace_their_group_in_order() -> None:
    app = CommandLine()
    app.command()(paint)
    told = CliRunner().invoke(app, ["--help"]).stdout
    names = [word for word in told.split() if word in ("--first", "--front", "--back", "--glows", "--last")]
    assert names == ["--first", "--front", "--glows", "--last"]
    done = CliRunner().invoke(app, ["--front", "red", "--glows"])
    assert done.stdout == f"1 {Colours('red', glows=True)} 2\n"
    assert CliRunner().invoke(app, ["--back", "red"]).exit_code == 2


def test_a_command_without_groups_stays_as_it_is() -> None:
    def plain(number: int = 1) -> None: ...

    assert expanded(plain) is plain
