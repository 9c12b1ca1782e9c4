"""The writer of a ledger: rows are stored in a mapped file at once, and committed in batches by a thread.

Group commit lets one disk flush serve many requests. Slow disks and locks never block the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from ...protocol.safety.system import boot_time
from ..budget import DAY_S
from .store import LedgerStore, LedgerWriteError, RowRefusedError
from .table import BookedRow

MAX_WAITING = 20_000
"""Maximum rows, of about 1 KB each, kept in memory while the database is unavailable."""

FLUSH_S = 2.0
CLOSE_S = 5.0
_MAX_BATCH = 1000
_SETTLED_S = 0.005  # seconds that a row waits for others to share its commit, unless a request waits for the commit
_RETRY_S = 0.5
_LAST_COMMIT_S = 1.0  # seconds that `close` waits for a running commit, in addition to its timeout
_POLL_S = 0.002
_MAINTENANCE_S = 60.0
_MAINTENANCE_RETRY_S = 5.0  # seconds before maintenance is retried after a failure
_PRUNED_AT_ONCE = 500
_log = logging.getLogger("updraft.ledger")


class Entry(msgspec.Struct, frozen=True):
    """One row to be written."""

    row: BookedRow
    # Whether the row is settled. False: an intent, which is the row of a request in flight.
    settled: bool
    # Resolved when the row is committed; None if no request waits for the commit.
    committed: asyncio.Future[bool] | None = None
    # Slot of the row's record in the intent file, until the commit.
    place: int | None = None


class LedgerWriter:
    """Writes rows from one event loop; several processes may write to one database. Call `close()` at the end.

    `keep_from`: returns the time before which rows are deleted, for the current time; both in seconds since the epoch.
    `drops_intents`: drop unsettled rows after a failed commit, since their requests were refused.
    """

    def __init__(
        self,
        store: LedgerStore,
        *,
        keep_from: Callable[[float], float] | None = None,
        drops_intents: bool = False,
        consequence: str = "Rows stay in memory meanwhile",
    ) -> None:
        self.worker = store.worker
        #: Number of rows that were lost.
        self.lost = 0
        #: Number of failed commits.
        self.failures = 0
        #: Error of the last commit, or None if it succeeded.
        self.problem: str | None = None
        self._store = store
        self._keep_from = keep_from
        self._drops_intents = drops_intents
        self._consequence = consequence
        self._calls: queue.SimpleQueue[threading.Event | Literal["write", "end"]] = queue.SimpleQueue()
        self._places: dict[str, int] = {}  # slots in the intent file, by row id
        self._entered: deque[Entry] = deque()
        self._unwritten: list[Entry] = []
        self._late: asyncio.TimerHandle | None = None
        self._closes_at: float | None = None
        self._committing_since: float | None = None
        self._maintenance_at = 0.0
        self._started_at, self._started_after_boot = time.time(), boot_time()
        self._healed_failures = 0  # value of `failures` at the last successful commit
        self._thread = threading.Thread(target=self._run, name="updraft-ledger", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Approximate number of rows not yet written."""
        return len(self._entered) + len(self._unwritten)

    @property
    def failing(self) -> bool:
        return self.problem is not None

    def flush(self, timeout_s: float = FLUSH_S, *, collect: bool = False) -> bool:
        """Commit all rows entered so far; with `collect`, also those of dead processes. Return False on timeout."""
        if collect:
            self._maintenance_at = 0.0
        done = threading.Event()
        self._calls.put(done)
        return done.wait(timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write the remaining rows within `timeout_s` seconds. Rows left over are written by the next process."""
        self._end(timeout_s)
        self._thread.join(timeout_s + _LAST_COMMIT_S)
        self._check_end()

    async def aclose(self, timeout_s: float = CLOSE_S) -> None:
        """Close as `close` does, without blocking the event loop or starting a thread, which is impossible at exit."""
        self._end(timeout_s)
        until = time.monotonic() + timeout_s + _LAST_COMMIT_S
        while self._thread.is_alive() and time.monotonic() < until:  # noqa: ASYNC110 - threads set no asyncio events
            await asyncio.sleep(_POLL_S)
        self._check_end()

    def _end(self, timeout_s: float) -> None:
        self._closes_at = time.monotonic() + timeout_s
        self._calls.put("end")

    def _check_end(self) -> None:
        if self._thread.is_alive():
            _log.error("The ledger does not respond: up to %d rows of this process are not written.", self.waiting)

    def _hangs(self) -> bool:
        """Return whether a commit has been blocked for long, by the disk or another process."""
        since = self._committing_since
        return since is not None and time.monotonic() > since + FLUSH_S

    def _journal(self, row_id: str, row: BookedRow) -> bool:
        """Store the row in the intent file. Return whether the file has a record of the request."""
        intents, before = self._store.intents, self._places.get(row_id)
        if self._closes_at is not None or intents is None:
            return False
        try:
            record = self._store.table.record_of(row)
        except UnicodeError:  # the commit will report the error
            return before is not None
        if (place := intents.add(record) if before is None else intents.replace(before, record)) is not None:
            self._places[row_id] = place
        return row_id in self._places

    def _settle(self, row_id: str, row: BookedRow, committed: asyncio.Future[bool] | None = None) -> None:
        self._queue_entry(Entry(row, True, committed, self._places.pop(row_id, None)))

    def _queue_entry(self, entry: Entry) -> None:
        if self.waiting >= MAX_WAITING:
            self.lost += 1
            self._forget([entry])
            if entry.committed is not None:
                entry.committed.set_result(False)
            return
        self._entered.append(entry)
        if entry.committed is not None:
            self._calls.put("write")
        elif self._late is None:
            self._late = asyncio.get_running_loop().call_later(_SETTLED_S, self._write_late)

    def _write_late(self) -> None:
        self._late = None
        if self._entered:
            self._calls.put("write")

    def _run(self) -> None:
        self._maintain()
        is_open = True
        while is_open or (self.waiting and self._has_time()):
            is_open, flushed = self._take(is_open)
            self._write()
            if not self.failing:
                self._maintain()
            for done in flushed:
                if self.failing:
                    self._calls.put(done)
                else:
                    done.set()
            if self.failing and self._has_time():
                time.sleep(_RETRY_S)
        if self.waiting:
            self._log_unwritten()
        self._store.close()

    def _log_unwritten(self) -> None:
        kept = sum(each.place is not None for each in (*self._unwritten, *self._entered))
        self.lost += self.waiting - kept
        if kept:
            _log.warning("%d rows are left for the next process, since the ledger cannot be written.", kept)
        if self.waiting > kept:
            _log.error("%d rows were lost, since the ledger cannot be written.", self.waiting - kept)

    def _take(self, is_open: bool) -> tuple[bool, list[threading.Event]]:
        """Move new rows to `_unwritten`. Return whether the thread continues, and the events to set after the write."""
        flushed: list[threading.Event] = []
        pause_s = _RETRY_S if self.failing else _MAINTENANCE_RETRY_S
        with contextlib.suppress(queue.Empty):
            call = self._calls.get(timeout=0 if self._unwritten or not is_open else pause_s)
            while True:
                is_open = is_open and call != "end"
                if isinstance(call, threading.Event):
                    flushed.append(call)
                call = self._calls.get_nowait()
        while self._entered and len(self._unwritten) < _MAX_BATCH:
            self._unwritten.append(self._entered[0])  # append first, so that `waiting` never misses a row
            self._entered.popleft()
        if self._entered:  # more than one batch is waiting
            for call in (*flushed, "write"):
                self._calls.put(call)
            flushed.clear()
        return is_open, flushed

    def _has_time(self) -> bool:
        return self._closes_at is None or time.monotonic() < self._closes_at

    def _write(self) -> None:
        if not self._unwritten:
            self.problem = None  # no rows are left, so the next row shows whether the database can be written
            return
        self._committing_since = time.monotonic()
        try:
            self._commit(self._unwritten)
        except Exception as error:  # noqa: BLE001 - the thread must survive any error
            if self.failures == self._healed_failures:
                message = "Cannot write the ledger: %s. %s."
                is_unknown = not isinstance(error, LedgerWriteError)
                _log.error(message, error, self._consequence, exc_info=is_unknown)
            self.problem = str(error)
            self.failures += 1
            _wake_waiters(self._unwritten, is_written=False)
            kept = [each for each in self._unwritten if each.settled or not self._drops_intents]
            self._unwritten = [msgspec.structs.replace(each, committed=None) for each in kept]
        else:
            if self.failures != self._healed_failures:
                _log.warning("The ledger can be written again.")
            self._healed_failures = self.failures
            self.problem = None
        finally:
            self._committing_since = None

    def _forget(self, batch: Sequence[Entry]) -> None:
        """Free the rows' slots in the intent file."""
        for each in batch:
            if each.place is not None and self._store.intents is not None:
                self._store.intents.remove(each.place)

    def _commit(self, batch: Sequence[Entry]) -> None:
        """Commit the rows together. If a row is refused, commit the rows one by one. No row is ever duplicated."""
        try:
            self._store.write(
                [each.row.values for each in batch if not each.settled],
                [each.row for each in batch if each.settled],
            )
        except RowRefusedError as error:
            if len(batch) > 1:
                for each in batch:
                    self._commit([each])
                return
            self.lost += 1
            _log.error("The database refused a row, which is lost: %s.", error)
        done = set(map(id, batch))
        self._unwritten = [each for each in self._unwritten if id(each) not in done]
        self._forget(batch)
        _wake_waiters(batch, is_written=True)

    def _maintain(self) -> None:
        """Periodically commit the rows of dead workers, mark their intents as abandoned, and delete old rows."""
        if self.failing or time.monotonic() < self._maintenance_at:
            return
        deleted, pause_s = 0, _MAINTENANCE_S
        try:
            count = 0
            for rows in self._store.orphaned_rows():
                entries = [Entry(row, self._store.table.is_settled(row.values)) for row in rows]
                self._commit(entries)
                count += sum(not each.settled for each in entries)
            if count := count + self._store.abandon():
                _log.warning("Marked %d requests of dead workers as abandoned.", count)
            if self._keep_from is not None:
                deleted = self._store.prune(self._keep_from(self._confirmed_time()), _PRUNED_AT_ONCE)
        except Exception as error:  # noqa: BLE001 - the thread must survive any error
            pause_s = _MAINTENANCE_RETRY_S
            _log.warning(
                "Ledger maintenance failed, will retry: %s.", error, exc_info=not isinstance(error, LedgerWriteError)
            )
        self._maintenance_at = time.monotonic() + (0.0 if deleted == _PRUNED_AT_ONCE else pause_s)

    def _confirmed_time(self) -> float:
        """Return the current time as far as the ledger confirms it, so that a clock that runs ahead deletes no rows.

        The ledger confirms the time of its newest row that was a day old at this start, and the time since this start.
        """
        newest = self._store.newest(self._started_at - DAY_S)
        confirmed = self._started_at if newest is None else newest
        return min(time.time(), confirmed + boot_time() - self._started_after_boot)


def _wake_waiters(batch: Sequence[Entry], *, is_written: bool) -> None:
    """Tell the requests that wait for these rows whether the commit succeeded, with one call to the event loop."""
    waiting = [each.committed for each in batch if each.committed is not None]
    if not waiting:
        return

    def wake() -> None:
        for each in waiting:
            note(each, is_written)

    with contextlib.suppress(RuntimeError):  # the event loop is closed, so no request waits
        waiting[0].get_loop().call_soon_threadsafe(wake)


def note(committed: asyncio.Future[bool], is_written: bool) -> None:
    """Resolve the future unless it is done."""
    if not committed.done():
        committed.set_result(is_written)
