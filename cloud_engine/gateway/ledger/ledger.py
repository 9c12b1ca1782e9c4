"""The gateway's ledger: a row is recorded as an intent before a node gets the request, and completed exactly once."""

from __future__ import annotations

import asyncio
from typing import Literal

from ....accounting.budget import DAY_S
from ....accounting.ledger.store import LedgerStore
from ....accounting.ledger.table import BookedRow
from ....accounting.ledger.writer import FLUSH_S, MAX_WAITING, Entry, LedgerWriter, note
from ....protocol.errors import OverloadedError
from .metering import UsageRow, values_of

LedgerFailureAction = Literal["stop", "continue"]
"""Refuse requests (503) while the ledger cannot be written, or answer them and keep the rows in memory."""

_CONSEQUENCES = {"stop": "Requests are refused meanwhile", "continue": "Rows stay in memory meanwhile"}


class UsageLedger(LedgerWriter):
    """Writes one row per request: first an intent, at the end the usage. Deletes rows older than `keep_days`."""

    def __init__(
        self, store: LedgerStore, *, on_failure: LedgerFailureAction = "stop", keep_days: float | None = None
    ) -> None:
        self._stops = on_failure == "stop"
        super().__init__(
            store,
            keep_from=None if keep_days is None else lambda now: now - keep_days * DAY_S,
            drops_intents=self._stops,
            consequence=_CONSEQUENCES[on_failure],
        )

    async def open(self, row: UsageRow) -> None:
        """Record a request before it is sent to a node, so that its row survives a crash of this process.

        Raises OverloadedError if the ledger cannot be written and `on_failure` is `stop`.
        """
        if self._stops and (self.failing or self._hangs() or self.waiting >= MAX_WAITING):
            raise _unwritable()
        row.worker, row.state = self.worker, "abandoned"  # the state that the row keeps if this process dies now
        if (self.failing or not self._store.commits_intents) and self._journal(row.id, BookedRow(values_of(row))):
            return
        row.state = "intent"
        if self.failing:
            self._queue_entry(Entry(BookedRow(values_of(row)), settled=False))
            return
        loop = asyncio.get_running_loop()
        committed: asyncio.Future[bool] = loop.create_future()
        self._queue_entry(Entry(BookedRow(values_of(row)), settled=False, committed=committed))
        late = loop.call_later(FLUSH_S, note, committed, False)
        try:
            if not await committed and self._stops:
                raise _unwritable()
        finally:
            late.cancel()

    def settle(self, row: UsageRow) -> None:
        """Write the final usage of a request, even if `open` recorded no intent. A second call changes nothing."""
        if row.state != "settled" or row.status >= 400:  # `open` did not know the status
            self.book(row)
        self._settle(row.id, BookedRow(values_of(row)))

    def book(self, row: UsageRow) -> None:
        """Save the usage so far, in case this process dies. The caller must still call `settle` at the end."""
        row.worker, row.state = self.worker, "settled"
        self._journal(row.id, BookedRow(values_of(row)))


def _unwritable() -> OverloadedError:
    return OverloadedError("The usage ledger cannot be written now: try again later.", code="ledger_unavailable")
