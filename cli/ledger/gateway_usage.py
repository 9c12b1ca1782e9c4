"""`updraft usage --gateway`: what the gateway's ledger adds up to, and its rows, for people and for programs."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...protocol.errors import InvalidRequestError
from ...protocol.safety.terminal_text import printable
from ..shared import json_output, output

Form = Literal["table", "json", "csv"]
_SHOWN = {
    "requests": "requests",
    "errors": "failed",
    "abandoned": "cut off",
    "prompt_tokens": "tokens\nread",
    "cached_tokens": "of them\ncached",
    "completion_tokens": "tokens\nwritten",
    "cost_usd": "cost",
}


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
    """A text commands no terminal. One that a spreadsheet would take for a formula is marked as a text."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else text
