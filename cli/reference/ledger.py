"""docs/reference/ledger.md: the tables of the router's ledger and of the gateway's usage file."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...cloud_engine.gateway.ledger.metering import UsageRow
from ...cloud_engine.gateway.ledger.opening import open_store
from ...router.accounting.budget import Charge
from ...router.accounting.ledger import Ledger, LedgerRow
from .fields import entries
from .markdown import code, page, table

_INTRODUCTION = """The ledger is a SQLite file with one row per request, failed and cancelled ones too. It holds no
prompt, no answer and no key. Rows older than `ledger_days` are deleted, except those that a running budget counts;
SQLite reuses their space. Files of an older format are brought up to date when they are opened."""
_OWN = {
    "period": "Of the budget: `day` or `month`.",
    "day": "The period's first day, in days since 1970, in UTC.",
    "scope": "All requests, those of a key, or those of a user.",
}


def ledger_page() -> str:
    with TemporaryDirectory() as folder:
        ledger, usage = Path(folder) / "ledger.sqlite3", Path(folder) / "usage.sqlite3"
        Ledger(ledger).close()
        open_store(usage).close()
        requests, spending = _columns(ledger, "requests", LedgerRow), _columns(ledger, "spending", Charge)
        used = _columns(usage, "usage", UsageRow)
    return page(
        "Ledger",
        _INTRODUCTION,
        "## Table `requests`",
        requests,
        "## Table `spending`",
        "What a period has spent, for budgets.",
        spending,
        "## The gateway's table `usage`",
        "One row per request to a relayed route, in the database that `updraft gateway --db` names.",
        used,
    )


def _columns(file: Path, name: str, described: type[Any]) -> str:
    texts = {each.name: each.text for each in entries(described)}
    connection = sqlite3.connect(file)
    try:
        found: list[tuple[str, str]] = connection.execute(
            f"SELECT name, type FROM pragma_table_info('{name}')"
        ).fetchall()
    finally:
        connection.close()
    return table(
        ("column", "type", "meaning"), [(code(each), kind, texts.get(each) or _OWN[each]) for each, kind in found]
    )
