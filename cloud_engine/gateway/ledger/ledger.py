"""The ledger of the gateway: an intent before a request is sent to a node, settled once, whatever became of it."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from ....accounting.ledger.store import LedgerStore
from ....accounting.ledger.writer import DAY_S, FLUSH_S, MAX_WAITING, Entry, LedgerWriter, note
from ....protocol.errors import OverloadedError
from .metering import UsageRow, values_of

FailurePolicy = Literal["stop", "continue"]
"""Whether requests are refused (503) or answered while the ledger cannot be written."""

_CONSEQUENCES = {"stop": "are refused until it can", "continue": "go on, and rows wait in memory"}


class UsageLedger(LedgerWriter):
    """Rows that are older than `keep_days` are deleted."""

    def __init__(
        self, store: LedgerStore, *, on_failure: FailurePolicy = "stop", keep_days: float | None = None
    ) -> None:
        self._stops = on_failure == "stop"
        super().__init__(
            store,
            keep_from=None if keep_days is None else lambda: time.time() - keep_days * DAY_S,
            drops_intents=self._stops,
            consequence=_CONSEQUENCES[on_failure],
        )

    async def open(self, row: UsageRow) -> None:
        """Keep the intent of a request that is about to be sent to a node, safe from the death of this process.

        Raises OverloadedError where the ledger cannot be written and the operator wants requests to stop then.
        """
        if self._stops and (self.failing or self._hangs() or self.waiting >= MAX_WAITING):
            raise _unwritable()
        row.worker, row.state = self.worker, "abandoned"  # if nothing follows
        if (self.failing or not self._store.commits_intents) and self._keep(row.id, values_of(row)):
            return
        row.state = "intent"
        if self.failing:
            self._enter(Entry(values_of(row), settled=False))
            return
        loop = asyncio.get_running_loop()
        committed: asyncio.Future[bool] = loop.create_future()
        self._enter(Entry(values_of(row), settled=False, committed=committed))
        late = loop.call_later(FLUSH_S, note, committed, False)
        try:
            if not await committed and self._stops:
                raise _unwritable()
        finally:
            late.cancel()

    def settle(self, row: UsageRow) -> None:
        """Write the request's usage. It needs no intent before it, and a second call changes nothing."""
        if row.state != "settled":
            self.book(row)
        self._settle(row.id, values_of(row))

    def book(self, row: UsageRow) -> None:
        """Make the usage so far safe from the death of this process. `settle` is to follow."""
        row.worker, row.state = self.worker, "settled"
        self._keep(row.id, values_of(row))


def _unwritable() -> OverloadedError:
    return OverloadedError("The gateway cannot account for requests now: try again later.", code="ledger_unavailable")
