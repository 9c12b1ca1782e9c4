"""Rows of the router's ledger, written without a router."""

from __future__ import annotations

from updraft.router.accounting.ledger import REQUESTS, Ledger, LedgerRow


def add_row(ledger: Ledger, row: LedgerRow) -> None:
    """Commit one row. Raises sqlite3.IntegrityError if the id exists."""
    marks = ", ".join("?" * len(REQUESTS.columns))
    with ledger.transaction() as connection:
        query = f"INSERT INTO requests ({', '.join(REQUESTS.columns)}) VALUES ({marks})"
        connection.execute(query, REQUESTS.values_of(row))
