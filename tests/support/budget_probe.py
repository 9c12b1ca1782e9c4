"""The spending of a ledger's budgets, read past the router."""

from __future__ import annotations

import sqlite3
from pathlib import Path


def spent(ledger: Path) -> tuple[int, int, float]:
    """Cloud requests, cloud tokens and money of all callers today."""
    with sqlite3.connect(ledger) as connection:
        query = "SELECT cloud_requests, cloud_tokens, usd FROM spending WHERE scope = 'all'"
        (row,) = connection.execute(query).fetchall()
    connection.close()
    return row
