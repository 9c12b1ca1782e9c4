"""`updraft why`: one request explained from the ledger: every decision, what it cost, and where its time went."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...protocol.errors import NotFoundError
from ..shared import json_output
from .rows import LedgerPath, decisions_of, facts_of, open_ledger, printable, time_of

if TYPE_CHECKING:
    from ...router.accounting.ledger import LedgerRow

GATES = ("rules", "before", "during", "after")
ROUTES = {
    "local": "by the device",
    "cloud": "by the cloud",
    "escalated": "by the cloud, which continued or verified what the device wrote",
    "fallback": "by the device, because the cloud could not",
    "cache": "with an earlier answer to the same request",
    "none": "not at all",
}


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
    row = _find(request_id, ledger)
    if as_json:
        json_output.show(facts_of(row))
        return
    from rich.markup import escape

    from ..shared.console import Console
    from ..shared.tables import facts_table

    Console(highlight=False).print(facts_table({label: escape(text) for label, text in explained(row).items()}))


def explained(row: LedgerRow) -> dict[str, str]:
    """The row as labelled lines, in the order in which a person asks."""
    from ..shared.tables import dollars

    facts = {
        "request": [f"{row.id}, {time_of(row)}, model {row.model or '-'}, status {row.status}"],
        "answered": [ROUTES.get(row.route, row.route)],
        "because": [row.reason],
        "decisions": [_decision(each) for each in decisions_of(row)] or ["none kept"],
    }
    if row.failure:
        facts["cloud failed"] = [row.failure]
    facts["time"] = [f"{row.latency_ms:,.0f} ms: device {row.local_ms:,.0f} ms, cloud {row.cloud_ms:,.0f} ms"]
    facts["tokens"] = [
        f"device {row.local_prompt_tokens:,} read, {row.local_tokens:,} written; "
        f"cloud {row.cloud_prompt_tokens:,} read, {row.cloud_tokens:,} written"
    ]
    if row.draft_proposed:
        facts["draft"] = [f"{row.draft_accepted:,} of {row.draft_proposed:,} tokens kept by the cloud"]
    if row.cloud_model:
        facts["cloud"] = [row.cloud_model]
    facts["cost"] = [f"{dollars(row.cost_usd, '.6f')}, saved {dollars(row.saved_usd, '.6f')} against the cloud alone"]
    if row.key:
        facts["key"] = [f"{row.key[:12]} (digest)"]
    return {label: "\n".join(map(printable, lines)) for label, lines in facts.items()}


def _decision(verdict: dict[str, Any]) -> str:
    gate = verdict["gate"]
    p_gain, threshold = verdict["p_gain"], verdict["threshold"]
    sure = "" if p_gain is None or threshold is None else f" [P(gain) {p_gain:.3f}, threshold {threshold:.3f}]"
    return f"gate {gate} {GATES[gate]}: {'cloud' if verdict['escalate'] else 'device'}: {verdict['reason']}{sure}"


def _find(request_id: str | None, path: Path | None) -> LedgerRow:
    with open_ledger(path) as ledger:
        row = ledger.get(request_id) if request_id is not None else next(iter(ledger.rows(limit=1)), None)
    if row is None:
        wanted = "The ledger is empty" if request_id is None else f"No request {request_id[:100]!r} is in the ledger"
        raise NotFoundError(f"{wanted} ({ledger.path}).")
    return row
