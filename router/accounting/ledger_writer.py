"""Rows on their way into the ledger: at once where the file is free, else as soon as it is. Nobody waits for them."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable

from .ledger import RETRY_S, Ledger, LedgerRow

log = logging.getLogger("updraft.router")

MAX_WAITING = 10_000  # rows, about a kilobyte each
AT_ONCE = 50  # rows between two looks at the event loop
CLOSING_S = 5.0

ExtraWrite = Callable[[sqlite3.Connection], None]


class LedgerWriter:
    """The ledger as one event loop writes it, of which it must be the only user. `close()` it in the end."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # Why the last row could not be written; None where another process only has the file.
        self.problem: str | None = None
        self._waiting: deque[tuple[LedgerRow, ExtraWrite | None]] = deque()
        self._task: asyncio.Task[None] | None = None

    def enter(self, row: LedgerRow, also: ExtraWrite | None = None) -> None:
        """As `Ledger.record`, but later where another process has the file, or the disk is full. Raises nothing."""
        if not self._waiting and self._try_enter(row, also):
            return
        if len(self._waiting) >= MAX_WAITING:
            log.error("request %s is not in the ledger: %d others wait for it", row.id, len(self._waiting))
            return
        self._waiting.append((row, also))
        if self._task is None or self._task.done():
            log.warning("the ledger %s cannot be written now; rows are kept until it can", self._ledger.path)
            self._task = asyncio.create_task(self._catch_up())

    async def close(self) -> None:
        """Enter what waits, for which it takes up to 5 seconds, and close the ledger."""
        if self._task is not None:
            self._task.cancel()
        until = time.monotonic() + CLOSING_S
        while self._waiting and time.monotonic() < until:
            await self._enter_some()
        if self._waiting:
            log.error("%d requests are not in the ledger %s", len(self._waiting), self._ledger.path)
        self._ledger.close()

    async def _catch_up(self) -> None:
        while self._waiting:
            await self._enter_some()

    async def _enter_some(self) -> None:
        for _ in range(min(AT_ONCE, len(self._waiting))):
            if not self._try_enter(*self._waiting[0]):
                await asyncio.sleep(RETRY_S)
                return
            self._waiting.popleft()
        await asyncio.sleep(0)

    def _try_enter(self, row: LedgerRow, also: ExtraWrite | None) -> bool:
        """False if it may later."""
        try:
            self._ledger.record(row, also)
            self.problem = None
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                self.problem = str(error)
            return False
        except (sqlite3.Error, ValueError, OverflowError):  # the latter two: what SQLite cannot hold
            log.exception("request %s cannot be entered in the ledger", row.id)
        return True
