"""`updraft log`: the latest requests from the ledger, a line for each."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ..shared import json_output
from .rows import LedgerPath, open_ledger


def log(
    number: Annotated[
        int, typer.Option("-n", "--number", min=1, max=10**6, help="How many requests, the newest ones.")
    ] = 20,
    tier: Annotated[
        Literal["local", "cloud", "none"] | None,
        typer.Option(help="Only those that this tier answered; none: those without an answer."),
    ] = None,
    ledger: LedgerPath = None,
    as_json: json_output.Flag = False,
) -> None:
    """List recent requests, the newest last: time, tier, model, tokens, cost, latency and reason.

    \b
    Examples
      updraft log
      updraft log -n 100 --tier cloud
      updraft log --json
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
