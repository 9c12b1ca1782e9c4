"""`updraft why`: one request explained from the ledger: every decision, what it cost, and where its time went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...protocol.errors import NotFoundError
from ..shared import json_output
from .rows import LedgerPath, open_ledger

if TYPE_CHECKING:
    from ...router.accounting.ledger import LedgerRow


def why(
    request_id: Annotated[
        str | None,
        typer.Argument(help="The request's id: updraft.request_id, or x-updraft-request-id. [the newest one]"),
    ] = None,
    ledger: LedgerPath = None,
    as_json: json_output.Flag = False,
) -> None:
    """Explain one request: who answered and why, every gate it passed, tokens, cost, and time in each tier.

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
        wanted = "The ledger is empty" if request_id is None else f"No request {request_id[:100]!r} is in the ledger"
        raise NotFoundError(f"{wanted} ({ledger.path}).")
    return row
