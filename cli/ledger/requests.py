"""`updraft why` and `updraft log`: explain one request of the ledger, and list recent requests."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ...protocol.errors import InvalidRequestError, NotFoundError
from ...protocol.safety.private_files import has_file
from ..shared import json_output

if TYPE_CHECKING:
    from ...router.accounting.ledger import Ledger, LedgerRow

LedgerPath = Annotated[
    Path | None, typer.Option("--ledger", metavar="PATH", help="Ledger to read. [the configured ledger]")
]


@contextmanager
def open_ledger(path: Path | None) -> Iterator[Ledger]:
    """Open the ledger at `path`, or the configured ledger, read-only.

    Raises InvalidRequestError if the ledger is missing, and StorageError if it is damaged.
    """
    from ...router.accounting.ledger import Ledger, collect_rows, damaged
    from ...router.settings_sources import load_config

    path = load_config().ledger if path is None else path
    if path is None or not has_file(path):
        where = "The ledger is off" if path is None else f"There is no ledger at {path}"
        raise InvalidRequestError(f"{where}: name a ledger with --ledger, or send a request first.")
    try:
        collect_rows(path)
        with closing(Ledger(path, read_only=True)) as ledger:
            yield ledger
    except sqlite3.DatabaseError as error:
        raise damaged(path, str(error)) from error


def why(
    request_id: Annotated[
        str | None, typer.Argument(help="Request id: updraft.request_id or x-updraft-request-id. [the newest request]")
    ] = None,
    ledger: LedgerPath = None,
    as_json: json_output.Flag = False,
) -> None:
    """Explain one request: the tier that answered and why, every gate's decision, tokens, cost, and time per tier.

    \b
    Examples
      updraft why
      updraft why chatcmpl-0123456789abcdef01234567 --json
    """
    from ...router.accounting.explanation import explained, facts_of

    row = _find(request_id, ledger)
    if as_json:
        json_output.show(facts_of(row))
        return
    from rich.markup import escape

    from ..shared.console import Console
    from ..shared.tables import facts_table

    Console(highlight=False).print(facts_table({label: escape(text) for label, text in explained(row).items()}))


def _find(request_id: str | None, path: Path | None) -> LedgerRow:
    with open_ledger(path) as ledger:
        row = ledger.get(request_id) if request_id is not None else next(iter(ledger.rows(limit=1)), None)
    if row is None:
        missing = "The ledger is empty" if request_id is None else f"Request {request_id[:100]!r} is not in the ledger"
        raise NotFoundError(f"{missing} ({ledger.path}).")
    return row


def log(
    number: Annotated[
        int, typer.Option("-n", "--number", min=1, max=10**6, help="Number of newest requests to list.")
    ] = 20,
    tier: Annotated[
        Literal["local", "cloud", "none"] | None,
        typer.Option(rich_help_panel="Advanced", help="Tier of the listed requests; none: without an answer."),
    ] = None,
    ledger: LedgerPath = None,
    as_json: json_output.Flag = False,
) -> None:
    """List recent requests, newest last: time, tier, model, tokens, cost, latency and reason.

    \b
    Examples
      updraft log
      updraft log -n 100 --tier cloud
    """
    from ...router.accounting.explanation import facts_of, printable, time_of

    with open_ledger(ledger) as opened:
        rows = opened.rows(limit=number, tier=tier)
    if as_json:
        json_output.show([facts_of(row) for row in rows])
        return
    from rich.markup import escape

    from ..shared.console import Console
    from ..shared.tables import columns, dollars

    figures = ("tokens\nlocal", "tokens\ncloud", "cost", "ms")
    table = columns("time", "tier", "model", *figures, right=figures)
    table.add_column("reason", ratio=1)
    for row in reversed(rows):
        table.add_row(
            time_of(row)[:19],
            row.tier if row.route in (row.tier, "none") else f"{row.tier} ({row.route})",
            escape(printable(row.cloud_model or row.model)),
            f"{row.local_prompt_tokens + row.local_tokens:,}",
            f"{row.cloud_prompt_tokens + row.cloud_tokens:,}",
            dollars(row.cost_usd, ".6f"),
            f"{row.latency_ms:,.0f}",
            escape(printable(row.reason if row.status < 400 else f"status {row.status}: {row.reason}")),
        )
    Console(highlight=False).print(table)
