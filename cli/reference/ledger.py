"""docs/reference/ledger.md: the tables of the router's ledger and of the gateway's usage file."""

from __future__ import annotations

from ...accounting.ledger.table import Table
from ...cloud_engine.gateway.ledger.metering import USAGE
from ...router.accounting.ledger import REQUESTS
from .fields import entries
from .markdown import code, page, table

_INTRODUCTION = """The ledger is a SQLite file with one row per request, including failed and cancelled requests. It
holds no prompts, answers or keys. Rows older than `ledger_days` are deleted unless a current budget period counts them;
SQLite reuses their space. Files of older formats are migrated when they are opened."""


def ledger_page() -> str:
    (spending,) = REQUESTS.side_tables
    return page(
        "Ledger",
        _INTRODUCTION,
        "## Table `requests`",
        _columns(REQUESTS),
        "## Table `spending`",
        "Sums of the current budget periods.",
        _columns(spending),
        "## The gateway's table `usage`",
        "One row per request to a relayed route, in the database that `updraft gateway --ledger` names.",
        _columns(USAGE),
    )


def _columns(described: Table) -> str:
    """Return a table of the columns, followed by former column names."""
    kinds = {name: kind.removesuffix(" NOT NULL") for name, kind in described.types().items()}
    rows = [
        (code(entry.name), kinds[entry.name], entry.text) for entry in entries(described.row) if entry.name in kinds
    ]
    former = [(code(old), kinds[name], f"Former name of {code(name)}.") for old, name in described.aliases.items()]
    return table(("column", "type", "meaning"), [*rows, *former])
