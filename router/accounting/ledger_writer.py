"""The writer of the router's ledger, and the recovery of rows that killed processes did not commit."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

from ...accounting.ledger.store import LedgerWriteError, RowRefusedError, SqliteStore, collect
from ...accounting.ledger.table import BookedRow, Values
from ...accounting.ledger.writer import LedgerWriter
from ...protocol.errors import ConfigurationError
from .ledger import REQUESTS, LedgerRow

log = logging.getLogger("updraft.router")


class RequestWriter(LedgerWriter):
    """Writer of ledger rows for one event loop. A row survives a kill of the process once `enter` has returned."""

    def __init__(self, path: Path, keep_from: Callable[[float], float] | None = None) -> None:
        """Open the ledger at `path`. Raises ConfigurationError."""
        super().__init__(
            SqliteStore(path, REQUESTS, is_strict=False),
            keep_from=keep_from,
            consequence=f"Rows stay in memory meanwhile. Run `updraft doctor` to check {path} for damage",
        )

    def keep(self, row: LedgerRow) -> None:
        """Keep the row of a request in flight, to commit if this process is killed before `enter`."""
        self._journal(row.id, BookedRow(REQUESTS.values_of(row)))

    def enter(
        self, row: LedgerRow, bookings: tuple[Values, ...] = (), committed: asyncio.Future[bool] | None = None
    ) -> None:
        """Queue one row for the ledger. Never raises. `bookings`: changes of the table `spending`, which also survive a
        kill. `committed`: future that is set after the commit, or after the first failed attempt."""
        booked = BookedRow(REQUESTS.values_of(row), bookings)
        self._journal(row.id, booked)
        self._settle(row.id, booked, committed)


def collect_rows(path: Path) -> None:
    """Commit the rows that killed processes left in files beside the ledger. Failures are only logged."""
    try:
        collect(path, REQUESTS)
    except (ConfigurationError, OSError, LedgerWriteError, RowRefusedError, sqlite3.Error) as error:
        log.warning("Cannot commit the rows of ended processes yet: %s", error)
