"""The writer of the router's ledger, and the rows that dead processes left for it."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

from ...accounting.ledger.store import (
    ExtraWrite,
    LedgerWriteError,
    RowRefusedError,
    SqliteStore,
    collect,
)
from ...accounting.ledger.writer import LedgerWriter
from ...protocol.errors import ConfigurationError
from .ledger import REQUESTS, LedgerRow

log = logging.getLogger("updraft.router")


class RequestWriter(LedgerWriter):
    """The rows of one event loop. A row outlives a kill of the process as soon as `enter` returns."""

    def __init__(self, path: Path, keep_from: Callable[[], float] | None = None) -> None:
        """Raises ConfigurationError."""
        super().__init__(
            SqliteStore(path, REQUESTS, needs_intents=False),
            keep_from=keep_from,
            consequence=f"go on, and rows wait in memory. `updraft doctor` says whether {path} is damaged",
        )

    def enter(
        self, row: LedgerRow, extra: ExtraWrite | None = None, committed: asyncio.Future[bool] | None = None
    ) -> None:
        """Write one row soon, and in the same transaction what `extra` writes. Raises nothing.

        `committed` is resolved after the commit, or once it has failed for the first time.
        """
        values = REQUESTS.values_of(row)
        self._keep(row.id, values)
        self._settle(row.id, values, extra, committed)


def collect_rows(path: Path) -> None:
    """Commit the rows that dead processes left beside the ledger, as far as this process can."""
    try:
        collect(path, REQUESTS)
    except (ConfigurationError, OSError, LedgerWriteError, RowRefusedError, sqlite3.Error) as error:
        log.warning("Rows of ended processes are not in the ledger yet: %s", error)
