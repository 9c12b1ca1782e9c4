"""`updraft usage`: sums tokens and costs of requests by day, model, tier or key, from router or gateway ledgers."""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...protocol.errors import InvalidRequestError
from ...protocol.safety.redaction import printable
from ..shared import json_output, output
from .requests import LedgerPath, open_ledger

if TYPE_CHECKING:
    from rich.table import Table

    from ...router.accounting.ledger import LedgerTotals

_SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SHOWN = {
    "requests": "requests",
    "errors": "failed",
    "abandoned": "cut off",
    "prompt_tokens": "tokens\nread",
    "cached_tokens": "tokens\ncached",
    "completion_tokens": "tokens\nwritten",
    "cost_usd": "cost",
}


def usage(
    by: Annotated[
        Literal["day", "model", "tier", "key", "task", "tenant", "node"],
        typer.Option(help="Column to group the sums by; tenant and node need --gateway."),
    ] = "day",
    since: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Earliest request: 30m, 12h, 7d or 4w ago, or 2026-01-31 (UTC). [all]"),
    ] = None,
    ledger: LedgerPath = None,
    gateway: Annotated[
        str | None, typer.Option(metavar="DB", help="Gateway's ledger to read: a SQLite file, or a postgresql:// URL.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV; needs --gateway.")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print each request; needs --gateway.")] = False,
    as_json: json_output.Flag = False,
) -> None:
    """Sum up the ledger: requests, local share, tokens, cost, and savings compared with using the cloud only.

    Days are UTC days, as in budgets. A cost is unknown if a model has no price.

    \b
    Examples
      updraft usage --since 30d
      updraft usage --by model
      updraft usage --gateway gateway.sqlite3 --by key --csv
    """
    start = 0.0 if since is None else _start(since)
    if gateway is not None:
        if ledger is not None or (as_csv and as_json):
            raise InvalidRequestError("Give --gateway or --ledger, not both, and --csv or --json, not both.")
        _show_gateway(gateway, by, start, as_csv=as_csv, as_json=as_json, rows=rows)
        return
    from ...router.accounting.ledger import GROUPS

    if as_csv or rows or by not in GROUPS:
        raise InvalidRequestError("--csv, --rows and --by tenant or node need the gateway's ledger: add --gateway DB.")
    with open_ledger(ledger) as opened:
        (total,) = opened.totals(since=start)
        groups = {name: opened.totals(name, since=start) for name in (GROUPS if as_json else (by,))}
    if as_json:
        sums = {name: [asdict(row) for row in rows] for name, rows in groups.items()}
        json_output.show({"since": start, "total": asdict(total), **sums})
        return
    from ..shared.console import Console

    console = Console(highlight=False)
    console.print(_table(by, groups[by], total))
    if total.unpriced:
        console.print(f'Requests to a model without a price: {total.unpriced:,}. Set \\[prices.models."NAME"].')


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
    """Return the time of --since in seconds since the epoch. Raises InvalidRequestError."""
    if match := re.fullmatch(r"([0-9]{1,6})([mhdw])", text):
        return time.time() - int(match[1]) * _SECONDS[match[2]]
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequestError(
            f"--since {text[:40]!r} is not a time: use 30m, 12h, 7d, 4w, or a date such as 2026-01-31."
        ) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _show_gateway(database: str, by: str, since: float, *, as_csv: bool, as_json: bool, rows: bool) -> None:
    """Print sums or single requests of a gateway's ledger. Raises ConfigurationError, InvalidRequestError."""
    from ...cloud_engine.gateway.ledger.opening import open_reader

    reader = open_reader(database, "gateway")
    if rows and not (as_csv or as_json):
        raise InvalidRequestError("--rows has no table form: add --csv or --json.")
    if rows:
        with reader.rows(since) as requests:
            if as_csv:
                _write_csv(requests)
            else:  # JSON Lines, because there may be many requests
                for request in requests:
                    output.echo(json.dumps(request))
        return
    sums = reader.totals([by], since)
    if as_csv:
        _write_csv(sums)
    elif as_json:
        json_output.show({"since": since, by: sums})
    else:
        _show_sums(by, sums)


def _show_sums(by: str, sums: list[dict[str, Any]]) -> None:
    from rich.markup import escape

    from ...router.accounting.explanation import printable as in_one_line
    from ..shared.console import Console
    from ..shared.tables import columns, dollars

    table = columns(by, *_SHOWN.values(), right=tuple(_SHOWN.values()))
    for row in sums:
        figures = [dollars(row[name], ".4f") if name == "cost_usd" else f"{row[name]:,}" for name in _SHOWN]
        table.add_row(escape(in_one_line(str(next(iter(row.values()))))) or "-", *figures)
    console = Console(highlight=False)
    console.print(table)
    if unpriced := sum(row["unpriced"] for row in sums):
        console.print(f"Requests to a model without a price: {unpriced:,}. See `updraft gateway --prices`.")


def _write_csv(rows: Iterable[Mapping[str, Any]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for number, row in enumerate(rows):
        if number == 0:
            writer.writerow(row)
        writer.writerow([_plain(value) for value in row.values()])


def _plain(value: object) -> object:
    """Remove control characters from a text, and quote it if spreadsheets would read it as a formula."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else text
