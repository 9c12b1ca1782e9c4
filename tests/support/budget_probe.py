"""Spending that a ledger has counted for its budgets, read directly from SQLite instead of through the router."""

from __future__ import annotations

import sqlite3
from pathlib import Path


def spent(ledger: Path) -> tuple[int, int, float]:
    """Return today's cloud requests, cloud tokens and US dollars of all callers together."""
    with sqlite3.connect(ledger) as connection:
        query = "SELECT cloud_requests, cloud_tokens, usd FROM spending WHERE scope = 'all'"
        (row,) = connection.execute(query).fetchall()
    connection.close()
    return row
