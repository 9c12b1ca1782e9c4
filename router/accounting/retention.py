"""Ledger retention: rows that are older than the user wants are deleted, off the event loop and a few at a time."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from ...accounting.budget import DAY_S
from ...protocol.errors import ConfigurationError
from .budget import Budget
from .ledger import Ledger

log = logging.getLogger("updraft.router")

ROUND_S = 3600.0
BATCH = 200  # rows: other writers wait for no more than these
PAUSE_S = 0.05  # between two batches


class LedgerRetention:
    """Keeps rows for `days`, and as long as a running budget counts them. Begins at once; `close()` it in the end."""

    def __init__(self, ledger: Path, days: int, budget: Callable[[], Budget | None]) -> None:
        self._ledger = ledger
        self._days = days
        self._budget = budget
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            before = time.time() - self._days * DAY_S
            if (budget := self._budget()) is not None:
                before = min(before, budget.counts_from())
            deleted = 0
            pruning = asyncio.create_task(asyncio.to_thread(_prune, self._ledger, before))
            try:
                deleted = await asyncio.shield(pruning)
            except (sqlite3.Error, ConfigurationError) as error:
                log.warning("old rows of the ledger %s stay for now: %s", self._ledger, error)
            finally:
                await asyncio.gather(pruning, return_exceptions=True)  # its thread has the file open
            await asyncio.sleep(PAUSE_S if deleted else ROUND_S)


def _prune(path: Path, before: float) -> int:
    """On a connection of its own: the event loop never waits for this one's lock."""
    with closing(Ledger(path)) as ledger:
        return ledger.prune(before, BATCH)
