"""`updraft doctor`: what is installed, what is broken, and the next step for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from ..shared import output

if TYPE_CHECKING:
    from .findings import Check

MARKS = {"ok": "[green]  ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}


def doctor(
    cloud: Annotated[
        str | None, typer.Option(help="Also ask this OpenAI endpoint for its models, e.g. https://host/v1.")
    ] = None,
    cloud_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the key of --cloud.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this installation: interpreter, packages, llama.cpp, models, settings, ports, cloud.

    llama.cpp and torch are tried in processes of their own, so a broken build is reported instead of taking the app
    down. Exit code 1 if anything failed; warnings are for what you may not need.

    \b
    Examples
      updraft doctor
      updraft doctor --cloud https://api.example.com/v1 --cloud-key-env EXAMPLE_KEY
    """
    from .checks import run_checks

    checks: list[Check] = []
    findings = run_checks(cloud, cloud_key_env)
    if as_json:
        checks.extend(findings)
        output.echo(output.as_json([dataclasses.asdict(check) for check in checks]))
    else:
        _show(findings, checks)
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _show(findings: Iterable[Check], seen: list[Check]) -> None:
    from rich.markup import escape

    from ..shared.console import Console

    console = Console(highlight=False)
    for check in findings:
        seen.append(check)
        console.print(f"{MARKS[check.status]}  [bold]{check.name:<14}[/bold] {escape(check.found)}", soft_wrap=True)
        if check.fix:
            console.print(f"{'':22}[dim]-> {escape(check.fix)}[/dim]", soft_wrap=True)
