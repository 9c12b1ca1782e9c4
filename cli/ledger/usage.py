"""`updraft usage`: tokens and costs of requests by day, model, tier or key, from the ledger or the gateway's."""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...protocol.errors import InvalidRequestError
from ...protocol.safety.terminal_text import printable
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
    "cached_tokens": "of them\ncached",
    "completion_tokens": "tokens\nwritten",
    "cost_usd": "cost",
}


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


Form = Literal["table", "json", "csv"]


@dataclass(frozen=True, slots=True)
class GatewayUsage:
    """The part of the ledger to show."""

    # A SQLite file, or a PostgreSQL URL.
    database: str
    # One line for each of these.
    by: str
    # Only requests since then, in seconds since the epoch.
    since: float
    # How.
    form: Form
    # Whole rows instead of sums.
    rows: bool = False

    def show(self) -> None:
        """Raises ConfigurationError, or InvalidRequestError for a table of whole rows."""
        from ...cloud_engine.gateway.ledger.opening import open_reader

        reader = open_reader(self.database)
        if not self.rows:
            self._show_sums(reader.totals([self.by], self.since))
        elif self.form == "table":
            raise InvalidRequestError("--rows is for programs: add --csv or --json.")
        else:
            with reader.rows(self.since) as found:
                self._write(found)

    def _show_sums(self, sums: list[dict[str, Any]]) -> None:
        if self.form != "table":
            self._write(sums)
            return
        from rich.markup import escape

        from ...router.accounting.explanation import printable as in_one_line
        from ..shared.console import Console
        from ..shared.tables import columns, dollars

        table = columns(self.by, *_SHOWN.values(), right=tuple(_SHOWN.values()))
        for each in sums:
            figures = [dollars(each[name], ".4f") if name == "cost_usd" else f"{each[name]:,}" for name in _SHOWN]
            table.add_row(escape(in_one_line(str(next(iter(each.values()))))) or "-", *figures)
        console = Console(highlight=False)
        console.print(table)
        if unpriced := sum(each["unpriced"] for each in sums):
            console.print(f"{unpriced:,} requests asked a model without a price: see `updraft gateway --prices`.")

    def _write(self, found: Iterable[Mapping[str, Any]]) -> None:
        """JSON Lines for whole rows, of which there may be many."""
        if self.form == "csv":
            writer = csv.writer(sys.stdout, lineterminator="\n")
            for number, each in enumerate(found):
                if number == 0:
                    writer.writerow(each)
                writer.writerow([_plain(value) for value in each.values()])
        elif self.rows:
            for each in found:
                output.echo(json.dumps(each))
        else:
            json_output.show({"since": self.since, self.by: list(found)})


def _plain(value: object) -> object:
    """A text commands no terminal. A formula of a spreadsheet is marked as text."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else text
