"""`updraft usage`: what requests took and cost, in total and per day, model, tier or key."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ...protocol.errors import InvalidRequestError
from ..shared import json_output
from .gateway_usage import GatewayUsage
from .requests import LedgerPath, open_ledger

if TYPE_CHECKING:
    from rich.table import Table

    from ...router.accounting.ledger import LedgerTotals

_SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def usage(
    by: Annotated[
        Literal["day", "model", "tier", "key", "tenant", "node"],
        typer.Option(help="One line for each of these; tenants and nodes are the gateway's."),
    ] = "day",
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Only requests since then: 30m, 12h, 7d, 4w, or 2026-01-31 (UTC). [all]"),
    ] = None,
    ledger: LedgerPath = None,
    gateway: Annotated[
        str | None,
        typer.Option(metavar="DB", help="The gateway's ledger instead: a SQLite file, or a postgresql:// URL."),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV; with --gateway.")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Each request, as CSV or JSON lines; with --gateway.")] = False,
    as_json: json_output.Flag = False,
) -> None:
    """Add up the ledger: requests, the share that stayed local, tokens, cost, and the saving against the cloud alone.

    Days are days of UTC, as budgets count them. A cost is unknown where a model has no price.

    \b
    Examples
      updraft usage --since 30d
      updraft usage --by model
      updraft usage --json
      updraft usage --gateway gateway.sqlite3 --by key --csv
    """
    start = 0.0 if since is None else _start(since)
    if gateway is not None:
        if ledger is not None or (as_csv and as_json):
            raise InvalidRequestError("Choose one of --gateway and --ledger, and one of --csv and --json.")
        GatewayUsage(gateway, by, start, "csv" if as_csv else "json" if as_json else "table", rows).show()
        return
    from ...router.accounting.ledger import GROUPS

    if as_csv or rows or by not in GROUPS:
        raise InvalidRequestError("--csv, --rows and --by tenant or node read the gateway's ledger: add --gateway DB.")
    with open_ledger(ledger) as opened:
        (total,) = opened.totals(since=start)
        groups = {name: opened.totals(name, since=start) for name in (GROUPS if as_json else (by,))}
    if as_json:
        found = {name: [asdict(each) for each in rows] for name, rows in groups.items()}
        json_output.show({"since": start, "total": asdict(total), **found})
        return
    from ..shared.console import Console

    console = Console(highlight=False)
    console.print(_table(by, groups[by], total))
    if total.unpriced:
        console.print(f'{total.unpriced:,} requests asked a model without a price: set \\[prices.models."NAME"].')


def _table(by: str, rows: list[LedgerTotals], total: LedgerTotals) -> Table:
    from rich.markup import escape

    from ...router.accounting.explanation import printable
    from ..shared.tables import columns, dollars, number

    figures = ("requests", "failed", "stayed\nlocal", "tokens\nlocal", "tokens\ncloud", "cost", "saved")
    table = columns(by, *figures, right=figures)
    for row in (*rows, total):
        if row is total:
            table.add_section()
        table.add_row(
            "total" if row is total else escape(printable(row.group)) or "-",
            f"{row.requests:,}",
            f"{row.errors:,}",
            number(row.local_share, ".0%"),
            f"{row.local_tokens:,}",
            f"{row.cloud_tokens:,}",
            dollars(row.cost_usd, ".4f"),
            dollars(row.saved_usd, ".4f"),
        )
    return table


def _start(text: str) -> float:
    """Seconds since the epoch. Raises InvalidRequestError."""
    if found := re.fullmatch(r"([0-9]{1,6})([mhdw])", text):
        return time.time() - int(found[1]) * _SECONDS[found[2]]
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequestError(
            f"--since {text[:40]!r} is no time: write 30m, 12h, 7d, 4w, or a date as 2026-01-31."
        ) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
