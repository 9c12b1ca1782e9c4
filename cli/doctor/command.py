"""`updraft doctor`: checks the installation and names the next step for each problem."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..shared import json_output, options

if TYPE_CHECKING:
    from .findings import Check

MARKS = {"ok": "[green]  ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}


def doctor(
    cloud_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Endpoint to check, e.g. https://host/v1. [the configured one]")
    ] = None,
    api_key_env: Annotated[str | None, options.key_env("the API key of --cloud-url", panel="Cloud")] = None,
    api_key_file: Annotated[Path | None, options.key_file("the API key of --cloud-url", panel="Cloud")] = None,
    as_json: json_output.Flag = False,
) -> None:
    """Check this installation: interpreter, packages, llama.cpp, models, settings, ports, cloud.

    Tests llama.cpp and torch in separate processes, so that a broken build is reported instead of crashing updraft.
    Exit code 1 if any check failed; a warning may concern a feature that you do not need.

    \b
    Examples
      updraft doctor
      updraft doctor --cloud-url https://api.example.com/v1 --api-key-env EXAMPLE_KEY
    """
    from ..shared.console import Console
    from ..shared.watch import Watch
    from .checks import run_checks

    watch = Watch(Console(stderr=True, highlight=False))
    checks: list[Check] = []
    for check in run_checks(cloud_url, options.given_key(api_key_env, api_key_file), watch.begin):
        watch.end()
        checks.append(check)
        if not as_json:
            _show(check)
    if as_json:
        json_output.show([{**dataclasses.asdict(check), "found": check.finding} for check in checks])
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _show(check: Check) -> None:
    from rich.markup import escape

    from ..shared.console import Console

    console = Console(highlight=False)
    console.print(f"{MARKS[check.status]}  [bold]{check.name:<14}[/bold] {escape(check.finding)}", soft_wrap=True)
    if check.fix:
        console.print(f"{'':22}[dim]-> {escape(check.fix)}[/dim]", soft_wrap=True)
